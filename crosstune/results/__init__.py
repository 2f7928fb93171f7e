"""What was found, and what follows from it."""
