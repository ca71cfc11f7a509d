"""What plugins register, and how it is found."""
