"""The commands of ``mose-fast``, a file each. Each has ``add``, which adds it to the parser."""
