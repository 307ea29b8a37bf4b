"""Scores of finished models: perplexity and tasks."""
