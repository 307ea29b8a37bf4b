"""A server on loopback that answers with the version an alias points at."""
