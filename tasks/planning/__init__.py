"""What a recipe will need, before anything is made."""
