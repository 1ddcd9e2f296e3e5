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

from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.hardware import Gpu, gpu, gpu_ids
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment
from kernelcast.models import model, model_ids
from kernelcast.models.architecture import Architecture
from kernelcast.models.precision import CACHE, WEIGHTS, Precision
from kernelcast.ops.dtypes import canonical_dtype
from kernelcast.search.layouts import has_experts
from kernelcast.search.sweep.constraint import Constraint
from kernelcast.stacks import Stack, stack, stack_ids
from kernelcast.stacks.engine_flags import canonical_names

NAMES = ("model", "gpu", "stack", "dtype", "kv_dtype")
LAYOUT = ("tp", "pp", "dp", "ep", "micro_batches", "sequence_parallel")
SIZES = ("batch", "input_len", "output_len", "cached", "chunk")
KEYS = (*NAMES, "layout", "max_gpus", *LAYOUT, "skew", *SIZES, "where", "samples", "seed")
AS_STORED = "own"  # of a format: as the checkpoint is; of the cache: as the activations
MAX_GPUS = 8  # of layout = "all"
_LEAST = {"batch": 1, "input_len": 1, "output_len": 1, "cached": 0, "chunk": 0}
_DEFAULTS = {"batch": 1, "input_len": 1024, "output_len": 128, "cached": 0}  # as infer's
_NO_CHUNK = -1  # as the stack's scheduler chunks prompts
_RANGE = ("from", "to", "steps", "step", "factor", "scale")
_LARGEST = 10**9
_MOST_LISTED = 1_000_000

Integers = NDArray[np.int64]
LayoutValues = tuple[int, ...]  # by LAYOUT; sequence_parallel is 0 or 1
T = TypeVar("T")


@dataclass(frozen=True)
class SweepValues:
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

    def sample(self, uniform: NDArray[np.float64]) -> Integers:
        """For numbers in [0, 1): each whole number of the range with its part of the (log) length."""
        if self.listed is not None:
            return self.at((uniform * self.count).astype(np.int64))
        if self.log:
            low, high = math.log(self.low), math.log(self.high + 1)
            values = np.floor(np.exp(low + uniform * (high - low)))
        else:
            values = self.low + np.floor(uniform * (self.high + 1 - self.low))
        return np.clip(values, self.low, self.high).astype(np.int64)

    @classmethod
    def read(cls, key: str, given: Any, least: int, sampled: bool) -> SweepValues:
        """A number, a list, or a range. ``sampled``: a range without steps is drawn from."""
        if not isinstance(given, Mapping):
            listed = given if isinstance(given, list) else [given]
            if not listed:
                raise KernelcastError(f"{key} = [] leaves nothing to sweep: give one number or more")
            return cls(tuple(dict.fromkeys(_integer(key, value, least) for value in listed)))
        refuse_unknown(f"key of {key} = {{ … }}", given, _RANGE)
        if "from" not in given or "to" not in given:
            raise KernelcastError(f"{key} = {{ … }} needs from and to, as in {{ from = 1, to = 256, factor = 2 }}")
        low, high = (_integer(f"{key}.{name}", given[name], least) for name in ("from", "to"))
        if low > high:
            raise KernelcastError(f"{key}: from {low} is more than to {high}")
        refuse_unknown(f"scale of {key}", [given.get("scale", "linear")], ("linear", "log"))
        log = given.get("scale") == "log"
        if log and low < 1:
            raise KernelcastError(f"{key}: a log scale starts at 1 or more, not at {low}")
        spacings = [name for name in ("steps", "step", "factor") if name in given]
        if not spacings and sampled:
            return cls(None, low, high, log)
        if len(spacings) != 1:
            raise KernelcastError(
                f"{key} = {{ from = {low}, to = {high} }} needs one of steps (how many), step (how far apart) and "
                f"factor (as in factor = 2), or samples = N at the top of the file"
            )
        return cls(_spaced(key, low, high, spacings[0], given[spacings[0]], log))


def _spaced(key: str, low: int, high: int, spacing: str, given: Any, log: bool) -> tuple[int, ...]:
    values: NDArray[Any]
    if spacing == "factor":
        if isinstance(given, bool) or not isinstance(given, int | float) or not given > 1 or low < 1:
            raise KernelcastError(f"{key}: factor is more than 1 and from at least 1, not {given!r} and {low}")
        count = math.floor(math.log(high / low) / math.log(given) + 1e-9) + 1
        values = low * float(given) ** np.arange(count)
    else:
        size = _integer(f"{key}.{spacing}", given, 1)
        if spacing == "steps" and size > _MOST_LISTED:
            raise KernelcastError(f"{key}: at most {_MOST_LISTED:,} steps, not {size:,}")
        if spacing == "step":
            values = np.arange(low, high + 1, size)
        else:
            values = np.geomspace(low, high, size) if log else np.linspace(low, high, size)
    return tuple(dict.fromkeys(np.rint(values).astype(int).tolist()))


def _integer(key: str, value: Any, least: int, most: float = _LARGEST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise KernelcastError(f"{key} is a whole number of {least} or more, not {value!r}")
    return value


def names_of(key: str, given: Any) -> list[str]:
    """One name or a list of names."""
    listed = given if isinstance(given, list) else [given]
    if not listed or not all(isinstance(name, str) for name in listed):
        raise KernelcastError(f"{key} is a name or a list of names, not {given!r}")
    return list(dict.fromkeys(listed))


# ---- layouts ----
def layout_of(values: LayoutValues) -> Layout:
    """Refuses what no model could be sharded by."""
    tp, pp, dp, ep, micro_batches, sequence_parallel = values
    return Layout(tp, pp, dp, ep, bool(sequence_parallel), micro_batches)


def legal_layouts(model: Architecture, gpu: Gpu, stack: Stack, max_gpus: int) -> tuple[LayoutValues, ...]:
    """All layouts by powers of two within so many GPUs that the model allows. Attention DP and EP are of models with
    experts."""
    powers = [1 << at for at in range(max_gpus.bit_length())]
    several = powers if has_experts(model) else [1]
    deployment = Deployment(model, gpu, stack, Precision())
    allowed = []
    for tp, pp, dp, ep in itertools.product(powers, powers, several, several):
        if tp * pp * dp > max_gpus or ep > tp * dp:
            continue
        try:
            replace(deployment, layout=Layout(tp, pp, dp, ep))
        except KernelcastError:
            continue
        allowed.append((tp, pp, dp, ep, 1, 0))
    return tuple(allowed)


def _listed_layouts(given: Mapping[str, Any]) -> tuple[LayoutValues, ...]:
    """``layout`` as a list of tables, else the product of tp, pp, dp, ep, …"""
    layout = given.get("layout")
    if layout is None:
        return tuple(itertools.product(*(_layout_numbers(name, given) for name in LAYOUT)))
    if not isinstance(layout, list) or not layout or not all(isinstance(table, dict) for table in layout):
        raise KernelcastError(f'layout is "all" or a list such as [{{ tp = 4 }}, {{ tp = 4, pp = 2 }}], not {layout!r}')
    for table in layout:
        refuse_unknown("part of a layout", table, LAYOUT)
    written = tuple(dict.fromkeys(tuple(_layout_numbers(name, table)[0] for name in LAYOUT) for table in layout))
    for values in written:  # a product may hold impossible layouts; what is written out may not
        layout_of(values)
    return written


def _layout_numbers(name: str, given: Mapping[str, Any]) -> Sequence[int]:
    if name != "sequence_parallel":
        return SweepValues.read(name, given.get(name, 1), 1, sampled=False).listed or ()
    value = given.get(name, False)
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(flag, bool) for flag in listed):
        raise KernelcastError(f"sequence_parallel is true, false or a list of both, not {value!r}")
    return [int(flag) for flag in dict.fromkeys(listed)]


# ---- the file ----
@dataclass(frozen=True)
class Sweep:
    """``layouts``: of each model. ``samples``: how many settings are drawn; None: all."""

    models: tuple[Architecture, ...]
    gpus: tuple[Gpu, ...]
    stacks: tuple[Stack, ...]
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    skews: tuple[float, ...]
    layouts: tuple[tuple[LayoutValues, ...], ...]
    sizes: Mapping[str, SweepValues]
    where: tuple[str, ...]
    samples: int | None
    seed: int
    given: Mapping[str, Any]  # the keys of the file

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The values of each column of ``NAMES``."""
        models = tuple(each.name for each in self.models)
        gpus, stacks = (tuple(each.id for each in group) for group in (self.gpus, self.stacks))
        return dict(zip(NAMES, (models, gpus, stacks, self.dtypes, self.kv_dtypes), strict=True))

    def constraints(self) -> tuple[Constraint, ...]:
        return tuple(Constraint(text, self.names, (*LAYOUT, "gpus", "skew", *SIZES)) for text in self.where)


def read_toml_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KernelcastError(f"no file {path}; a sweep is a TOML file that gives at least model and gpu") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KernelcastError(f"{path} is not readable as TOML: {error}") from None


def sweep_of(given: Mapping[str, Any]) -> Sweep:
    """Refuses unknown keys and names, and values that no setting can have."""
    given = canonical_names(given, KEYS)
    refuse_unknown("key", given, KEYS)
    for key, example in (("model", "llama-3.1-8b"), ("gpu", "h200_sxm")):
        if key not in given:
            raise KernelcastError(f'{key} is missing: give one or more, as in {key} = ["{example}"]')
    models = looked_up("model", given["model"], model, model_ids, lambda each: each.name)
    gpus = looked_up("gpu", given["gpu"], gpu, gpu_ids, lambda each: each.id)
    stacks = looked_up("stack", given.get("stack", "vllm"), stack, stack_ids, lambda each: each.id)
    samples = _optional_integer(given, "samples", None, 1)
    sizes = {
        name: SweepValues.read(name, given.get(name, _DEFAULTS.get(name)), _LEAST[name], samples is not None)
        if name in given or name in _DEFAULTS
        else SweepValues((_NO_CHUNK,))
        for name in SIZES
    }
    where = given.get("where", [])
    sweep = Sweep(
        models, gpus, stacks, _formats("dtype", given, WEIGHTS), _formats("kv_dtype", given, CACHE), _skews(given),
        _layouts(given, models, gpus[0], stacks[0]), sizes, tuple(where) if isinstance(where, list) else (where,),
        samples, _optional_integer(given, "seed", 0, 0) or 0, dict(given),
    )  # fmt: skip
    sweep.constraints()  # refuses what does not parse
    return sweep


def looked_up(
    key: str, given: Any, find: Callable[[str], T], ids: Callable[[], Sequence[str]], name_of: Callable[[T], str]
) -> tuple[T, ...]:
    """Things by their names; "all": the catalogue."""
    chosen: dict[str, T] = {}
    for each in map(find, ids() if given == "all" else names_of(key, given)):
        if chosen.setdefault(name_of(each), each) != each:
            raise KernelcastError(f"two different {key}s are called {name_of(each)}; rename one")
    return tuple(chosen.values())


def _formats(key: str, given: Mapping[str, Any], known: tuple[str, ...]) -> tuple[str, ...]:
    listed = names_of(key, given.get(key, AS_STORED))
    chosen = [AS_STORED if name.lower() == "auto" else canonical_dtype(name) for name in listed]
    refuse_unknown(key, chosen, (AS_STORED, *known))
    return tuple(dict.fromkeys(chosen))


def _skews(given: Mapping[str, Any]) -> tuple[float, ...]:
    value = given.get("skew", 0.0)
    listed = value if isinstance(value, list) else [value]
    if not listed or any(isinstance(skew, bool) or not isinstance(skew, int | float) or skew < 0 for skew in listed):
        raise KernelcastError(f"skew is a number of 0 or more, or a list of them, not {value!r}")
    return tuple(dict.fromkeys(map(float, listed)))


def _layouts(
    given: Mapping[str, Any], models: tuple[Architecture, ...], gpu: Gpu, stack: Stack
) -> tuple[tuple[LayoutValues, ...], ...]:
    both = [name for name in LAYOUT if name in given] if "layout" in given else []
    if both:
        raise KernelcastError(f"layout says how models are sharded; leave out {', '.join(both)}")
    if given.get("layout") == "all":
        most = _optional_integer(given, "max_gpus", MAX_GPUS, 1) or MAX_GPUS
        return tuple(legal_layouts(each, gpu, stack, most) for each in models)
    if "max_gpus" in given:
        raise KernelcastError('max_gpus belongs to layout = "all"; else say where = ["gpus <= 8"]')
    return len(models) * (_listed_layouts(given),)


def _optional_integer(given: Mapping[str, Any], key: str, default: int | None, least: int) -> int | None:
    value = given.get(key, default)
    return None if value is None else _integer(key, value, least, math.inf)
