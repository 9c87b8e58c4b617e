"""Many runs: grids, the scheduler, the table of runs."""
