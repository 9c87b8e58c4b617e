"""The paper's tables and figures: the runs behind each, the paper's numbers, and the rule by which
our numbers pass or miss.
"""
