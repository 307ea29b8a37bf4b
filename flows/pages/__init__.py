"""What people look at when a flow has ended."""
