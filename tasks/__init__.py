"""One module a stage, and what every stage shares."""
