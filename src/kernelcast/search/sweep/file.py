"""A sweep file: what to sweep, checked whole before any work."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu, gpu, gpu_ids
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment
from kernelcast.models import model, model_ids
from kernelcast.models.architecture import Architecture
from kernelcast.models.layers import Experts
from kernelcast.models.precision import CACHE, WEIGHTS, Precision
from kernelcast.search.sweep.where import Where
from kernelcast.stacks import Stack, stack, stack_ids

WORDS = ("model", "gpu", "stack", "dtype", "kv_dtype")
CUTS = ("tp", "pp", "dp", "ep", "micro_batches", "sequence_parallel")
SIZES = ("batch", "input_len", "output_len", "cached", "chunk")
Integers = NDArray[np.int64]
_KEYS = ("from", "to", "steps", "step", "factor", "scale")
_SCALES = ("linear", "log")
_LARGEST = 10**9
_MOST_LISTED = 1_000_000


@dataclass(frozen=True)
class Values:
    """``listed``, or where that is None anything from ``low`` to ``high``, evenly or (``log``) evenly in its log."""

    listed: tuple[int, ...] | None
    low: int = 0
    high: int = 0
    log: bool = False

    @property
    def count(self) -> int:
        return len(self.listed or ())

    def at(self, codes: Integers) -> Integers:
        return np.asarray(self.listed, dtype=np.int64)[codes]

    def drawn(self, share: NDArray[np.float64]) -> Integers:
        """For numbers in [0, 1): each whole number of the range with its part of the (log) length."""
        if self.listed is not None:
            return self.at((share * self.count).astype(np.int64))
        if self.log:
            low, high = math.log(self.low), math.log(self.high + 1)
            found = np.floor(np.exp(low + share * (high - low)))
        else:
            found = self.low + np.floor(share * (self.high + 1 - self.low))
        return np.clip(found, self.low, self.high).astype(np.int64)

    @classmethod
    def read(cls, key: str, given: Any, least: int, sampled: bool) -> Values:
        """``sampled``: the file asks for samples, so that a range without steps is drawn from."""
        if isinstance(given, Mapping):
            return _grid(key, given, least, sampled)
        listed = given if isinstance(given, list) else [given]
        if not listed:
            raise KernelcastError(f"{key} = [] leaves nothing to sweep: give one number or more")
        return cls(tuple(dict.fromkeys(_whole(key, value, least) for value in listed)))


def _grid(key: str, given: Mapping[str, Any], least: int, sampled: bool) -> Values:
    for name in given:
        if name not in _KEYS:
            raise unknown(f"key of {key} = {{ … }}", name, _KEYS)
    if "from" not in given or "to" not in given:
        raise KernelcastError(f"{key} = {{ … }} needs from and to, as in {{ from = 1, to = 256, factor = 2 }}")
    low, high = (_whole(f"{key}.{name}", given[name], least) for name in ("from", "to"))
    if low > high:
        raise KernelcastError(f"{key}: from {low} is more than to {high}")
    scale = given.get("scale", "linear")
    if scale not in _SCALES:
        raise unknown(f"scale of {key}", scale, _SCALES)
    if scale == "log" and low < 1:
        raise KernelcastError(f"{key}: a log scale starts at 1 or more, not at {low}")
    ways = [name for name in ("steps", "step", "factor") if name in given]
    if not ways and sampled:
        return Values(None, low, high, scale == "log")
    if len(ways) != 1:
        raise KernelcastError(
            f"{key} = {{ from = {low}, to = {high} }} needs one of steps (how many), step (how far apart) and factor "
            f"(as in factor = 2), or samples = N at the top of the file"
        )
    return Values(_spread(key, low, high, ways[0], given[ways[0]], scale == "log"))


def _spread(key: str, low: int, high: int, way: str, given: Any, log: bool) -> tuple[int, ...]:
    if way == "factor":
        if isinstance(given, bool) or not isinstance(given, int | float) or not given > 1 or low < 1:
            raise KernelcastError(f"{key}: factor is more than 1 and from at least 1, not {given!r} and {low}")
        count = math.floor(math.log(high / low) / math.log(given) + 1e-9) + 1
        found: NDArray[Any] = low * float(given) ** np.arange(count)
    else:
        size = _whole(f"{key}.{way}", given, 1)
        if way == "steps" and size > _MOST_LISTED:
            raise KernelcastError(f"{key}: at most {_MOST_LISTED:,} steps, not {size:,}")
        if way == "step":
            found = np.arange(low, high + 1, size)
        else:
            found = np.geomspace(low, high, size) if log else np.linspace(low, high, size)
    return tuple(dict.fromkeys(np.rint(found).astype(int).tolist()))


def words(key: str, given: Any) -> list[str]:
    """One name or a list of names."""
    listed: Sequence[Any] = given if isinstance(given, list) else [given]
    if not listed or not all(isinstance(word, str) for word in listed):
        raise KernelcastError(f"{key} is a name or a list of names, not {given!r}")
    return list(dict.fromkeys(listed))


def _whole(key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise KernelcastError(f"{key} is a whole number of {least} or more, not {value!r}")
    return value


Cut = tuple[int, ...]  # the numbers of CUTS; sequence_parallel is 0 or 1
MAX_GPUS = 8


def layout_of(cut: Cut) -> Layout:
    """Refuses what no model could be cut by."""
    tp, pp, dp, ep, micro_batches, sequence_parallel = cut
    return Layout(tp, pp, dp, ep, bool(sequence_parallel), micro_batches)


def listed_cuts(given: Mapping[str, Any]) -> tuple[Cut, ...]:
    """Of the keys of a file: ``layout`` as a list of tables, else the product of tp, pp, dp, ep, …"""
    layout = given.get("layout")
    if layout is None:
        return tuple(itertools.product(*(_numbers(name, given.get(name, _usual(name))) for name in CUTS)))
    if not isinstance(layout, list) or not layout or not all(isinstance(one, dict) for one in layout):
        raise KernelcastError(f'layout is "all" or a list such as [{{ tp = 4 }}, {{ tp = 4, pp = 2 }}], not {layout!r}')
    found = []
    for one in layout:
        for name in one:
            if name not in CUTS:
                raise unknown("part of a layout", name, CUTS)
        found.append(tuple(_numbers(name, one.get(name, _usual(name)))[0] for name in CUTS))
    return tuple(dict.fromkeys(found))


def _usual(name: str) -> Any:
    return False if name == "sequence_parallel" else 1


def _numbers(name: str, given: Any) -> Sequence[int]:
    if name != "sequence_parallel":
        return Values.read(name, given, 1, sampled=False).listed or ()
    listed = given if isinstance(given, list) else [given]
    if not listed or not all(isinstance(one, bool) for one in listed):
        raise KernelcastError(f"sequence_parallel is true, false or a list of both, not {given!r}")
    return [int(one) for one in dict.fromkeys(listed)]


def legal_cuts(model: Architecture, gpu: Gpu, stack: Stack, max_gpus: int) -> tuple[Cut, ...]:
    """All cuts by powers of two within so many GPUs that the model allows. Attention DP and EP are of models with
    experts."""
    powers = [1 << at for at in range(max_gpus.bit_length())]
    experts = any(isinstance(run.layer.mlp, Experts) for run in model.layers)
    several = powers if experts else [1]
    place = Deployment(model, gpu, stack, Precision())
    found = []
    for tp, pp, dp, ep in itertools.product(powers, powers, several, several):
        if tp * pp * dp > max_gpus or ep > tp * dp:
            continue
        try:
            replace(place, layout=Layout(tp, pp, dp, ep))
        except KernelcastError:
            continue
        found.append((tp, pp, dp, ep, 1, 0))
    return tuple(found)


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
