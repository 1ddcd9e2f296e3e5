"""What a family's file gives: how its calls are drawn, and its part of all calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernelcast.collect.shapes import Draw

Drawn = dict[str, Any]  # parameters of a call, op first
Table = Mapping[str, tuple[Callable[[Draw], Drawn], float]]  # family: (how a call is drawn, its part of all calls)
