"""What a model's name means: which bundled config has its layers, and which number format its endings say.

The part after "/" decides, so that mirrors and tuned versions are found; sizes and families are never guessed. The
words are data: names.toml.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.toml_folder import read_toml

FILE = Path(__file__).with_name("names.toml")
_SEPARATORS = re.compile(r"[\s:\-]+")
_DROPPED = re.compile(r"(?<!\d)-|-(?!\d)")  # dashes, but between digits
_LONGEST = 100  # characters of a name that are compared with others
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([bm])(?![a-z])")
Index = Mapping[str, tuple[str, str]]  # spellings (``key_of``) -> bundled id, Hugging Face id


@dataclass(frozen=True)
class Meaning:
    """A bundled id, the Hugging Face id of the model, and the format that the name says, where it says one: its ending
    and the quantization_config of a checkpoint in it ({}: not quantised)."""

    stem: str
    hub: str
    ending: str = ""
    quantization: Mapping[str, Any] = field(default_factory=dict)


def parts_of(name: str) -> tuple[str, str]:
    """The organisation of a Hugging Face id, or "", and the rest; in lower case, with dashes between words."""
    organisation, _, tail = name.strip().strip("/").lower().rpartition("/")
    tail = tail.rpartition("--")[2]  # models--org--name, as a cache names its folders
    tail = re.sub(r"\.(?=w\d+a\d+|gguf$)", "-", tail)  # quantized.w8a8, model.gguf
    return organisation.rpartition("/")[2], _SEPARATORS.sub("-", tail).strip("-")


def key_of(tail: str) -> str:
    """A spelling without separators, but between digits: llama3.1-8b for Llama-3.1-8B, Llama 3.1 8B and llama3_1-8b."""
    text = re.sub(r"(?<![.\d])(\d)_(\d)(?!\d*[bm])", r"\1.\2", tail).replace("_", "-")
    for maker in _table()["makers"]:
        text = text.removeprefix(f"{maker}-")
    return _DROPPED.sub("", text)


def without_tuned_parts(tail: str) -> str:
    """Without the words that tell tuned versions apart, wherever they stand."""
    return "-".join(word for word in tail.split("-") if word not in _table()["tuned"]) or tail


def same_layers() -> Mapping[str, list[str]]:
    """Other models by the bundled id whose layers they have."""
    table: Mapping[str, list[str]] = _table()["same_layers"]
    return table


def read_format(tail: str, organisation: str, in_id: bool = True) -> tuple[str, str, Mapping[str, Any]]:
    """A name without the ending that says a number format, the ending, and the quantization_config that it means; the
    name, "" and {} where it says none. ``in_id``: whether the id names the organisation."""
    for entry in _table()["formats"]:
        match = re.search(rf"[-_.]({entry['ending']})$", tail)
        if match and organisation in entry.get("organisations", (organisation,)) and (in_id or not entry.get("in_id")):
            unread = {"quant_method": entry.get("unknown") or match[1]}  # for the message
            return tail[: match.start()], match[1], entry.get("quantization_config", unread)
    return tail, "", {}


def meaning(name: str, index: Index) -> Meaning | None:
    """What a name means, where that is certain."""
    organisation, tail = parts_of(name)
    if found := _lookup(tail, index):
        return Meaning(*found)
    rest, ending, config = read_format(tail, organisation)
    found = _lookup(rest, index) if ending else None
    if found is None:
        return None
    if not organisation:  # then as the maker of the model ships this format
        config = read_format(tail, parts_of(found[1])[0], in_id=False)[2]
    return Meaning(*found, ending, config)


def _lookup(tail: str, index: Index) -> tuple[str, str] | None:
    return index.get(key_of(tail)) or index.get(key_of(without_tuned_parts(tail)))


def build_index(names: Iterable[tuple[str, str, str]]) -> Index:
    """Of (name, bundled id, Hugging Face id); a name as it is comes before one without its tuned words."""
    exact: dict[str, tuple[str, str]] = {}
    folded: dict[str, tuple[str, str]] = {}
    for name, stem, hub in names:
        tail = parts_of(name)[1]
        exact.setdefault(key_of(tail), (stem, hub))
        folded.setdefault(key_of(without_tuned_parts(tail)), (stem, hub))
    return folded | exact


def refuse_other_routes(name: str) -> None:
    """Refuse a model of another sort, with what can be done instead."""
    tail = parts_of(name)[1]
    for entry in _table()["other_routes"]:
        if re.search(entry["names"], tail):
            raise KernelcastError(f"{name!r} is {entry['why']}")


def nearest_names(name: str, index: Index, limit: int = 3) -> list[tuple[str, str]]:
    """The (bundled id, Hugging Face id) nearest to a name by its spelling, its family and its size; each model once."""
    organisation, tail = parts_of(name)
    key = key_of(without_tuned_parts(read_format(tail[:_LONGEST], organisation)[0]))

    def score(other: str) -> float:
        alike = difflib.SequenceMatcher(None, key, other).ratio()
        begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(key, other, strict=False)))
        family = begin / max(len(key), 1)
        return alike + family + 0.3 * _like_size(key, other) if alike > 0.55 else 0.0

    scores = {other: score(other) for other in index}
    near: dict[str, str] = {}
    for other in sorted((other for other in scores if scores[other] > 0.8), key=lambda other: -scores[other]):
        near.setdefault(*index[other])
    return list(near.items())[:limit]


def _like_size(first: str, second: str) -> float:
    """1 for names with the same size in them (8b), 0 for one of half or twice as many parameters, or none."""
    sizes = [_SIZE.search(text) for text in (first, second)]
    counts = [float(size[1]) * {"b": 1e9, "m": 1e6}[size[2]] if size else 0.0 for size in sizes]
    return max(0.0, 1 - abs(math.log2(counts[0] / counts[1]))) if all(counts) else 0.0


@functools.cache
def _table() -> dict[str, Any]:
    return read_toml(FILE)
