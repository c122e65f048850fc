"""What steps read."""
