"""What every method stands on: the learner, its model, memory, planning and registry."""
