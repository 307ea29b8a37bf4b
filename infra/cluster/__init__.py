"""Ray: where pieces run."""
