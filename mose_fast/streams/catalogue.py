"""The registered streams by name, with a line on each; a list of names does not need torch."""

from __future__ import annotations

from mose_fast.settings.run import near_matches

_SUMMARIES = {
    "digits": "scikit-learn's handwritten digits as 32x32 RGB, 5 tasks x 2 classes; no download",
    "split-mnist": "MNIST padded to 32x32 RGB, 5 tasks x 2 classes",
    "split-cifar10": "CIFAR-10, 5 tasks x 2 classes",
    "split-cifar100": "CIFAR-100, 10 tasks x 10 classes",
    "split-tiny-imagenet": "Tiny-ImageNet at 64x64, 100 tasks x 2 classes (tasks=10: 10 x 20); no automatic download",
}


def names() -> list[str]:
    """The registered streams, the one that needs no download first."""
    return list(_SUMMARIES)


def summary(name: str) -> str:
    """One line about a registered stream. Raises StreamError if there is no such stream."""
    if name not in _SUMMARIES:
        from mose_fast.streams.draws import StreamError

        raise StreamError(f"stream {name!r} is unknown{near_matches(name, names())}")
    return _SUMMARIES[name]
