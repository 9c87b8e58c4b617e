"""The build back end of pyproject.toml: setuptools, with torch as a build requirement that matches
the torch that will run.

An isolated ``pip install .`` compiles in a fresh environment. Asked for any torch there, pip takes
the newest, and the library would not load beside an older one; so the release already installed is
asked for.
"""

from __future__ import annotations

import sysconfig
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (every hook that is not overridden below)

from build_tools.plan import installed_torch, torch_requirement


def _torch() -> str:
    target = installed_torch([sysconfig.get_path("platlib"), sysconfig.get_path("purelib")])
    return torch_requirement(target and target[0], exact=True)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """setuptools' requirements, ninja and torch."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), "ninja", _torch()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """The same."""
    return [*build_meta.get_requires_for_build_editable(config_settings), "ninja", _torch()]
