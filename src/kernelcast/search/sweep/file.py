"""A sweep file: what to sweep, checked whole before any work."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu, gpu, gpu_ids
from kernelcast.models import model, model_ids
from kernelcast.models.architecture import Architecture
from kernelcast.models.precision import CACHE, WEIGHTS
from kernelcast.search.sweep.columns import CUTS, SIZES
from kernelcast.search.sweep.layouts import MAX_GPUS, Cut, layout_of, legal_cuts, listed_cuts
from kernelcast.search.sweep.values import Values, words
from kernelcast.search.sweep.where import Where
from kernelcast.stacks import Stack, stack, stack_ids

OWN = "own"  # of a format: as the checkpoint is; of the cache: as the numbers between layers
_LEAST = {"batch": 1, "input_len": 1, "output_len": 1, "cached": 0, "chunk": 0}
_USUAL = {"batch": 1, "input_len": 1024, "output_len": 128, "cached": 0}  # as infer's
_NO_CHUNK = -1  # as the stack's scheduler cuts prompts
KEYS = ("model", "gpu", "stack", "dtype", "kv_dtype", "layout", "max_gpus", *CUTS, "skew", *SIZES, "where", "samples",
        "seed")  # fmt: skip


T = TypeVar("T")


@dataclass(frozen=True)
class Sweep:
    """What a file asks for. ``layouts``: of each model. ``samples``: how many settings are drawn; None: all."""

    models: tuple[Architecture, ...]
    gpus: tuple[Gpu, ...]
    stacks: tuple[Stack, ...]
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    skews: tuple[float, ...]
    layouts: tuple[tuple[Cut, ...], ...]
    sizes: Mapping[str, Values]  # of a batch, by name
    where: tuple[str, ...]
    samples: int | None
    seed: int
    asked: Mapping[str, Any]  # the file's own keys

    @property
    def words(self) -> dict[str, tuple[str, ...]]:
        """The values that each column of words may have."""
        return {
            "model": tuple(one.name for one in self.models),
            "gpu": tuple(one.id for one in self.gpus),
            "stack": tuple(one.id for one in self.stacks),
            "dtype": self.dtypes,
            "kv_dtype": self.kv_dtypes,
        }

    def constraints(self) -> tuple[Where, ...]:
        return tuple(Where(text, self.words, (*CUTS, "gpus", "skew", *SIZES)) for text in self.where)


def read_sweep(path: Path) -> Sweep:
    """Refuses unknown keys and names, and values that no setting can have."""
    try:
        asked = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KernelcastError(f"no file {path}; a sweep is a TOML file that gives at least model and gpu") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KernelcastError(f"{path} is not readable as TOML: {error}") from None
    try:
        return sweep_of(asked)
    except KernelcastError as error:
        raise KernelcastError(f"{path}: {error}") from None


def sweep_of(asked: Mapping[str, Any]) -> Sweep:
    for key in asked:
        if key not in KEYS:
            raise unknown("key", key, KEYS)
    for key, example in (("model", "llama-3.1-8b"), ("gpu", "h200_sxm")):
        if key not in asked:
            raise KernelcastError(f'{key} is missing: give one or more, as in {key} = ["{example}"]')
    models = _named("model", asked["model"], model, model_ids, lambda found: found.name)
    gpus = _named("gpu", asked["gpu"], gpu, gpu_ids, lambda found: found.id)
    stacks = _named("stack", asked.get("stack", "vllm"), stack, stack_ids, lambda found: found.id)
    samples, seed = _number(asked, "samples", None, 1), _number(asked, "seed", 0, 0)
    sizes = {
        name: Values.read(name, asked.get(name, _USUAL.get(name)), _LEAST[name], samples is not None)
        if name in asked or name in _USUAL
        else Values((_NO_CHUNK,))
        for name in SIZES
    }
    found = Sweep(
        models, gpus, stacks, _formats("dtype", asked, WEIGHTS), _formats("kv_dtype", asked, CACHE), _skews(asked),
        _layouts(asked, models, gpus[0], stacks[0]), sizes, _where(asked), samples, seed or 0, dict(asked),
    )  # fmt: skip
    found.constraints()  # refuses what does not parse
    return found


def _named(
    key: str, given: Any, find: Callable[[str], T], ids: Callable[[], Sequence[str]], name_of: Callable[[T], str]
) -> tuple[T, ...]:
    """Things by their names; "all": every one of the catalogue."""
    found: dict[str, T] = {}
    for word in ids() if given == "all" else words(key, given):
        one = find(word)
        if found.setdefault(name_of(one), one) != one:
            raise KernelcastError(f"two different {key}s are called {name_of(one)}; rename one")
    return tuple(found.values())


def _formats(key: str, asked: Mapping[str, Any], known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = words(key, asked.get(key, OWN))
    for word in chosen:
        if word not in (OWN, *known):
            raise unknown(key, word, (OWN, *known))
    return tuple(chosen)


def _skews(asked: Mapping[str, Any]) -> tuple[float, ...]:
    given = asked.get("skew", 0.0)
    listed = given if isinstance(given, list) else [given]
    if not listed or any(isinstance(one, bool) or not isinstance(one, int | float) or one < 0 for one in listed):
        raise KernelcastError(f"skew is a number of 0 or more, or a list of them, not {given!r}")
    return tuple(dict.fromkeys(float(one) for one in listed))


def _layouts(
    asked: Mapping[str, Any], models: tuple[Architecture, ...], chip: Gpu, engine: Stack
) -> tuple[tuple[Cut, ...], ...]:
    both = [name for name in CUTS if name in asked] if "layout" in asked else []
    if both:
        raise KernelcastError(f"layout says how models are cut; leave out {', '.join(both)}")
    if asked.get("layout") == "all":
        most = _number(asked, "max_gpus", MAX_GPUS, 1) or MAX_GPUS
        return tuple(legal_cuts(one, chip, engine, most) for one in models)
    if "max_gpus" in asked:
        raise KernelcastError('max_gpus belongs to layout = "all"; else say where = ["gpus <= 8"]')
    cuts = listed_cuts(asked)
    for cut in cuts if "layout" in asked else ():  # one that was written out is meant; a product may have some
        layout_of(cut)
    return len(models) * (cuts,)


def _where(asked: Mapping[str, Any]) -> tuple[str, ...]:
    given = asked.get("where", [])
    return tuple(given) if isinstance(given, list) else (given,)


def _number(asked: Mapping[str, Any], key: str, usual: int | None, least: int) -> int | None:
    value = asked.get(key, usual)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise KernelcastError(f"{key} is a whole number of {least} or more, not {value!r}")
    return value
