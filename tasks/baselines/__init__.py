"""What is trained and scored beside a method, and what it costs."""
