"""MLflow: what came of it. Nothing outside this room imports it."""
