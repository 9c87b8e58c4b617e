"""Tables, figures, statistics and the page made of many runs."""
