"""Recipes: schema, reading, and what speaks against one."""
