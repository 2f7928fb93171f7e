"""Rows to train on and rows held out."""
