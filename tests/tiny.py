"""Flags of the smallest run there is: ten batches, a few seconds."""

TINY = ("--stream", "digits", "--width", "1", "--memory", "64", "--limit-per-task", "20", "--device", "cpu")
