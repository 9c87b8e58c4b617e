"""The paper's tables and figures, each as the runs behind it, the numbers it prints, and the rule
by which ours pass or miss.
"""
