"""One adapter on all rows."""
