"""Learners in the loops of other libraries (docs/integrations.md)."""
