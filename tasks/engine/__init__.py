"""What every stage shares: fingerprint, workspace, pieces, records, costs."""
