"""How far a question is from the data: three levels, the best first, and that of a whole from its parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Support = Literal["seen", "near", "extrapolated"]
SUPPORT: dict[str, str] = {
    "seen": "calls of this kind were measured on this GPU",
    "near": "one step from measured calls: a word, the GPU, or the range",
    "extrapolated": "farther from measured calls: physics carries most of it",
}
MOST = 0.9  # of the time, that a level must reach to be told for the whole


def support_of(times: Iterable[tuple[float, str]]) -> str:
    """The level of support that nine tenths of the time reach; ``times``: seconds and the level of each part."""
    known = list(times)
    total, reached = sum(time for time, _ in known), 0.0
    for level in SUPPORT:
        reached += sum(time for time, own in known if own == level)
        if reached >= MOST * total:
            return level
    return list(SUPPORT)[-1]
