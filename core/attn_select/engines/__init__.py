"""What adapters for engines share."""
