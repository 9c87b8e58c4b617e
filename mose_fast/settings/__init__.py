"""Settings: how one is declared, and those of a run and of a stream."""
