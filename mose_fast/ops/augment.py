"""Application of view parameters to images. No native kernel serves it yet: every call goes to the reference."""

from mose_fast.reference.augment import MIRROR, apply_views, orient

__all__ = ["MIRROR", "apply_views", "orient"]
