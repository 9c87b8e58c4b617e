"""A run folder: its files, checkpoints, results, and the table of many runs."""
