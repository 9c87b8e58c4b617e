"""The paper's tables and figures: the runs behind, its numbers, the rule of pass and miss."""
