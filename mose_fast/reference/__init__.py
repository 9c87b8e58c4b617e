"""Pure PyTorch versions of the ops: the definitions that every back end is tested against."""
