"""Our learners where other packages' users are."""
