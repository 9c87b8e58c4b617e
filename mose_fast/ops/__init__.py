"""The public face of each native op: checks, choice of back end, autograd, torch.compile."""
