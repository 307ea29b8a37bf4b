"""What flows that make or change a model share: its stages, its registration, what it gained."""
