"""Searches the settings of a method on held-out training images (docs/tuning.md)."""
