"""Pure PyTorch twins of every op, of the model and of the whole step: the meaning of the code."""
