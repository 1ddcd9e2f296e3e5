"""What other distributions add to kernelcast through entry points: commands, predictors, collectors."""

from __future__ import annotations

from typing import Any

from kernelcast.errors import KernelcastError

COMMANDS, PREDICTORS, COLLECTORS = (f"kernelcast.{name}" for name in ("commands", "predictors", "collectors"))


def entry_points(group: str) -> Any:
    from importlib.metadata import entry_points as find  # reads the folder of every distribution

    return find(group=group)


def plugin(group: str, name: str) -> Any:
    """The object that ``kernelcast-lab`` registers as ``name``."""
    for point in entry_points(group):
        if point.name == name:
            return point.load()
    raise KernelcastError(
        f"{name!r} is part of kernelcast-lab, which is not installed: pip install ./src/kernelcast_lab in a clone"
    )
