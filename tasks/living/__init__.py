"""A model's life after its birth: lineage, freshness, retention."""
