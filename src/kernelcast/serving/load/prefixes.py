"""What prompts begin with together, found in their texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kernelcast.serving.load.load import Pieces

_LEAST_CHARACTERS = 64  # some 16 tokens, a block of a server's cache: less is of no use to it


def shared_by_text(prompts: Sequence[str], inputs: NDArray[np.int64]) -> tuple[Pieces, ...]:
    """Pieces of each prompt that another begins with too; characters count as tokens do on average in the prompt.

    Prompts that begin alike stand together in a sorted list: a group shares its shortest common beginning, and falls
    apart into smaller groups that share more.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    alike = np.array([0, *(_alike(prompts[a], prompts[b]) for a, b in pairwise(order))])
    pieces: list[list[tuple[int, int]]] = [[] for _ in prompts]
    streams, groups = 0, [(0, len(order), 0)]  # from, to, characters that are shared already
    while groups:
        first, last, known = groups.pop()
        if last - first < 2:
            continue
        common = int(alike[first + 1 : last].min())
        cuts = [first, *(first + 1 + np.flatnonzero(alike[first + 1 : last] == common)).tolist(), last]
        if common - known >= _LEAST_CHARACTERS:
            leader = order[first]
            tokens = round((common - known) * int(inputs[leader]) / max(len(prompts[leader]), 1))
            for row in order[first:last]:
                left = int(inputs[row]) - sum(part for _, part in pieces[row])
                if min(tokens, left) > 0:
                    pieces[row].append((streams, min(tokens, left)))
            streams, known = streams + 1, common
        groups += [(start, end, known) for start, end in pairwise(cuts)]
    return tuple(map(tuple, pieces)) if any(pieces) else ()


def _alike(one: str, other: str) -> int:
    """Characters that two texts begin with together."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
