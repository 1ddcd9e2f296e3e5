"""Which GPU of the catalogue a name means: ids, aliases, names as drivers print them, memory sizes and form factors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from kernelcast.errors import KernelcastError
from kernelcast.toml_folder import read_toml

_NOT_FORECAST = Path(__file__).with_name("not_forecast.toml")
_SAY_NOTHING = ("nvidia", "tesla", "amd", "instinct", "geforce", "gpu", "graphics", "card")
_COUNT = (
    re.compile(r"(?P<count>\d{1,4}) ?[x×*] ?(?P<name>[a-z].*|\d{4}.*)"),
    re.compile(r"(?P<name>.+?)[ :]?[x×*:] ?(?P<count>\d{1,4})"),
)
_MEMORY = re.compile(r"\b(\d{1,4}) ?(?:gib|gb|g)\b")
_MEMORY_TYPE = re.compile(r"\b(hbm\d?e?|gddr\dx?|oam)\b")
_LONGEST = 60  # characters of a name that are compared with others
_TOLERANCE = 0.06  # 80 GB is 80e9 bytes to one and 80 GiB to another


def normalised(name: str) -> str:
    """'NVIDIA H200' and 'h200' alike: lower case, no vendor names, no punctuation."""
    return "".join(word for word in _words(name).split() if word not in _SAY_NOTHING)


def find(name: str, spellings: Mapping[str, str], memory: Mapping[str, int]) -> str | None:
    """The id that a name means, by the catalogue's ``spellings`` (normalised) and bytes of ``memory`` by id; None:
    nothing that is certain. Several GPUs are refused, as are accelerators that no forecast describes."""
    if found := spellings.get(normalised(name)):
        return found
    for pattern in _COUNT:
        match = pattern.fullmatch(name.strip().lower())
        if match and (one := find(match["name"], spellings, memory)):
            if int(match["count"]) == 1:
                return one
            raise KernelcastError(
                f"{name!r} is {int(match['count'])} GPUs: name one, {one}, and say how many are used by `tp`, `pp` "
                "and `dp` (in plan and compare: max_gpus)"
            )
    text = re.sub(r"\b(sxm|pcie?)\d\b", r"\1", _MEMORY_TYPE.sub(" ", _words(name)))
    if found := spellings.get(normalised(text)):
        return found
    size = _MEMORY.search(text)
    if size is None:
        return None
    rest = normalised(_MEMORY.sub(" ", text))
    if found := spellings.get(f"{rest}{size[1]}gb"):
        return found
    found = spellings.get(rest)
    if found and not _holds(memory[found], int(size[1])):
        raise KernelcastError(f"{found} has {memory[found] / 2**30:.0f} GiB of memory, not the {size[1]} of {name!r}"
                              f"{_hint(_of_family(found, int(size[1]), memory))}; {ROUTE}")  # fmt: skip
    return found


ROUTE = (
    "a GPU of your own is a TOML file: `kernelcast collect --specs -o my_gpu.toml` measures it, docs/new-gpu.md says "
    "what it holds"
)


def unknown_gpu(name: str, spellings: Mapping[str, str]) -> KernelcastError:
    """The error for a name that means no GPU of the catalogue: the nearest ones, and how to describe another."""
    text = _words(name)
    for group in read_toml(_NOT_FORECAST)["group"]:
        if re.search(group["names"], text):
            return KernelcastError(f"{name!r} is {group['why']}")
    key = normalised(name)[:_LONGEST]
    alike = {each: difflib.SequenceMatcher(None, key, each).ratio() for each in spellings if _same_series(key, each)}
    near = sorted((each for each in alike if alike[each] >= 0.6), key=lambda each: (-alike[each], each))
    ids = list(dict.fromkeys(spellings[each] for each in near))[:3]
    return KernelcastError(
        f"unknown gpu {name!r}{_hint(ids)}; `kernelcast gpus` lists {len(set(spellings.values()))}; {ROUTE}"
    )


def _same_series(key: str, other: str) -> bool:
    """GeForce cards are four digits: 3050 is near 3060, not near gb300."""
    key_is, other_is = (re.match(r"([rg]tx)?\d{4}(?!\d)", text) is not None for text in (key, other))
    return other_is or not key_is


def _words(name: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9×*]+", " ", name.lower()).split())


def _holds(held_bytes: int, size: int) -> bool:
    return any(abs(held_bytes / unit / size - 1) <= _TOLERANCE for unit in (1e9, 2**30))


def _of_family(gpu_id: str, size: int, memory: Mapping[str, int]) -> list[str]:
    family = gpu_id.split("_")[:2] if gpu_id.startswith("rtx") else gpu_id.split("_")[:1]
    return [each for each in memory if each.split("_")[: len(family)] == family and _holds(memory[each], size)]


def _hint(ids: list[str]) -> str:
    return f" (did you mean {', '.join(ids)}?)" if ids else ""
