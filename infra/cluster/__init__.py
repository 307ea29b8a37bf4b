"""Ray: where pieces run. Nothing outside this room imports it."""
