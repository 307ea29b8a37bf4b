"""The stages of Symphony-MoE: models that share no seed, brought together."""
