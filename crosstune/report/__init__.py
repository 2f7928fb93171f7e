"""A run for people: one HTML page, tables for the terminal."""
