"""MLflow: what came of it."""
