"""What every flow shares: its session, its progress, its command line."""
