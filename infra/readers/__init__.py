"""Programs that open what leaves the house: each runs in an environment of its own."""
