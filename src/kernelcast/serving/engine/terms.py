"""What a benchmark of a server taught of it, as a file: its host's times, and what its steps take over forecasts."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.files import complete
from kernelcast.stacks import Stack

TERMS = ("request_s", "front_s", "token_s", "step_s", "sequence_s", "prompt_factor", "decode_factor")
HOST_TERMS = TERMS[:5]
SPREAD = "spread"  # how far its latencies lie from those of the fit
_KIND = "kernelcast server"


def write_terms(path: Path, stack: Stack, about: dict[str, Any]) -> None:
    """The terms of a stack; ``about``: what they were learnt from."""
    told = {"kind": _KIND, "stack": stack.id, "about": about,
            "terms": {name: getattr(stack, name) for name in (*TERMS, SPREAD)}}  # fmt: skip
    with complete(path.resolve()) as part:
        part.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def without_terms(stack: Stack) -> Stack:
    """``stack`` as if its server had none of them: what tells two servers apart beyond their terms."""
    none: dict[str, Any] = dict.fromkeys((*TERMS, SPREAD), 0.0)
    return replace(stack, **none)


def _fits(name: str, value: Any) -> bool:
    """Seconds are 0 or more, factors above 0, a spread is a share."""
    if name not in (*TERMS, SPREAD) or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    above = value > 0 if name.endswith("factor") else value >= 0
    return above and value < (1.0 if name == SPREAD else math.inf)


def read_terms(path: Path, stack: Stack, gpus: Collection[str]) -> Stack:
    """``stack`` with the terms of a file. What steps take over their forecast is of the GPU that was measured: where
    ``gpus`` (their labels) has another, only the times of the host are taken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KernelcastError(
            f"no file {path}; `kernelcast replay BENCH.json --calibrate -o FILE` writes one"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KernelcastError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != _KIND or not isinstance(found.get("terms"), dict):
        raise KernelcastError(f"{path} is no file of `kernelcast replay --calibrate`: its kind is not {_KIND!r}")
    if found.get("stack") != stack.id:
        raise KernelcastError(f"{path} tells of a server of {found.get('stack')}, not of {stack.id}: give --stack")
    terms = found["terms"]
    for name, value in terms.items():
        if not _fits(name, value):
            known = ", ".join((*TERMS, SPREAD))
            raise KernelcastError(f"{path}: {name} = {value!r} is none of {known} with a number that it can be")
    if set(gpus) != {found.get("about", {}).get("gpu")}:
        terms = {name: value for name, value in terms.items() if name in HOST_TERMS}
    return replace(stack, **terms)
