"""The command line and what only it needs."""
