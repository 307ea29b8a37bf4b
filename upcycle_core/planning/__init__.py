"""What a computation will need, from a model's configuration alone."""
