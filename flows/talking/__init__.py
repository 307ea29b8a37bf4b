"""The page on which people talk to a registered model and see which expert made which token."""
