"""Learners in the loops of other libraries, and as a classifier of scikit-learn."""
