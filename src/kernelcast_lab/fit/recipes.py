"""Recipes: how the weights of a family are made, one TOML file a family, so that one command makes them again.

What a file does not say it takes from its ``base``, which lies beside it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.toml_folder import read_from

RECIPES = Path(__file__).parents[1] / "recipes"
FAMILIES = (
    "gemm", "attention", "attention_backward", "masked_attention", "moe", "mla", "moe_gemm", "grouped_mm", "memory",
    "multi_tensor", "collective", "conv2d", "spatial", "indexed", "recurrent", "linear_attention", "deepep",
    "mhc", "mla_layer", "sparse_attention",
)  # fmt: skip


@dataclass(frozen=True)
class Data:
    """Which measured rows a family is fitted on."""

    sources: tuple[str, ...]  # only of these; none: of all
    leave_out: tuple[str, ...]  # rows whose kernel's name contains one of these
    not_fitted: tuple[str, ...]  # "source split": kept for tests of that source's own protocol
    fitted_still: tuple[str, ...]  # GPUs by how their ids start, of which there is no other split
    event_timed: bool  # long calls timed by events count as kernels too
    sweeps: bool  # configs of our own sweeps too; their test models are left out everywhere
    slower_configs: int  # for each shape of a table of the best configs, so many that are only known to be slower
    slower_of: tuple[str, ...]  # the sources of such tables


@dataclass(frozen=True)
class Training:
    """How a network is trained. The dropouts are the share of rows without their GPU, or another choice."""

    hidden: tuple[int, ...]
    epochs: int
    batch: int
    learning_rate: float
    weight_decay: float
    gpu_dropout: float
    word_dropout: float
    noise: float  # on the standardised numbers, so that the network stays smooth
    seed: int = field(default=0, kw_only=True)  # each network has its own


@dataclass(frozen=True)
class Settings:
    """What is trained, and on how many rows (0: all)."""

    networks: int
    transfer_networks: int  # small, and their mean is steadier than each
    main: Training
    transfer: Training
    ceiling: Training
    rows_left_out: int  # rows of the fits that learn how wide to be on GPUs left out
    least_share: float  # of the rows: small sources are repeated towards it,
    most_repeats: int  # so many times at most
    rows: int = 0
    seed: int = 0
    finetune: Training | None = None  # goes on with the main networks,
    finetune_share: float = 0.0  # with this instead of ``least_share``
    workers: int = 1


@dataclass(frozen=True)
class Recipe:
    """The file of a family."""

    id: str
    family: str
    networks: int
    transfer_networks: int
    rows_left_out: int
    least_share: float
    most_repeats: int
    rows: int
    seed: int
    data: Data
    main: Training
    transfer: Training
    ceiling: Training
    finetune: Training | None = None
    finetune_share: float = 0.0

    def __post_init__(self) -> None:
        where = f"recipe {self.id}"
        trained = ("main", "transfer", "ceiling", *(["finetune"] if self.finetune else []))
        for name, expected in (("data", Data), *((name, Training) for name in trained)):
            object.__setattr__(self, name, _table(expected, getattr(self, name), f"{where}, [{name}]"))
        _check(self, where)
        refuse_unknown("family", [self.family], FAMILIES)

    @property
    def settings(self) -> Settings:
        """What ``fit_family`` takes."""
        return Settings(**{each.name: getattr(self, each.name) for each in fields(Settings) if each.name != "workers"})


def recipe(family: str) -> Recipe:
    """The one that the shipped weights of a family were made by."""
    return read_from(RECIPES, Recipe, family)


def read_recipe(path: Path) -> Recipe:
    """A recipe of one's own."""
    if not path.is_file() or path.suffix != ".toml" or path.stem != path.stem.lower():
        raise KernelcastError(f"{path}: a recipe is a file NAME.toml, its name in lower case")
    try:
        return read_from(path.parent, Recipe, path.stem)
    except tomllib.TOMLDecodeError as error:
        raise KernelcastError(f"{path}: {error}") from None


def recipes_of(families: Sequence[str], files: Sequence[Path]) -> dict[str, Recipe]:
    """The recipes of these families, or of the files alone; without either of all families. A file is for its family
    instead of what ships."""
    given = [read_recipe(path) for path in files]
    by_family = {each.family: each for each in given}
    if len(by_family) < len(given):
        raise KernelcastError("more than one recipe for a family: give each once")
    return {
        name: by_family.get(name) or recipe(name)
        for name in FAMILIES
        if name in (*families, *by_family) or not (families or by_family)
    }


def changed(settings: Settings, *, epochs: int | None = None, batch: int | None = None, **other: Any) -> Settings:
    """The same with other passes or another batch of the main networks; ``other``: fields of the settings. With other
    passes nothing is fine-tuned."""
    if epochs:
        settings = replace(settings, finetune=None)
    main = replace(settings.main, epochs=epochs or settings.main.epochs, batch=batch or settings.main.batch)
    return replace(settings, main=main, **{name: value for name, value in other.items() if value is not None})


T = TypeVar("T")


def _table(expected: type[T], pairs: Any, where: str) -> T:
    """A table of a recipe as its dataclass; keys that are missing or unknown are refused."""
    if isinstance(pairs, expected):
        return pairs
    if not isinstance(pairs, tuple):
        raise KernelcastError(f"{where}: a table is needed, not {pairs!r}")
    result: Mapping[str, Any] = dict(pairs)
    known = {each.name: each.default is MISSING for each in fields(expected) if not each.kw_only}  # type: ignore[arg-type]
    missing, extra = sorted(set(known) - set(result)), sorted(set(result) - set(known))
    if missing or extra:
        texts = (", ".join(names) or "nothing" for names in (missing, extra))
        raise KernelcastError("{}: missing {}; unknown {}".format(where, *texts))
    made = expected(**{name: tuple(value) if isinstance(value, list) else value for name, value in result.items()})
    _check(made, where)
    return made


# What a field may hold, by its type as written; of lists each member.
_FIELD_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool,), "float": (int, float), "str": (str,)}
_POSITIVE = ("epochs", "batch", "hidden", "networks", "transfer_networks", "most_repeats")


def _check(made: Any, where: str) -> None:
    """Values of the type that the dataclass says, and no number below 0, or 1 where there is no fit without."""
    for each in fields(made):
        expected, value = str(each.type), getattr(made, each.name)
        many = expected.startswith("tuple[")
        wanted = _FIELD_TYPES.get(expected.removeprefix("tuple[").removesuffix(", ...]"))
        if wanted is None:
            continue  # a table, which was checked as such
        least = int(each.name in _POSITIVE)
        parts = value if many and isinstance(value, tuple) else (value,)
        right = isinstance(value, tuple) == many and all(_fits(part, wanted, least) for part in parts)
        if not right:
            above = "" if wanted[0] in (bool, str) else f" from {least} on"
            raise KernelcastError(f"{where}: {each.name} = {value!r} is not {expected}{above}")


def _fits(value: Any, allowed: tuple[type, ...], least: int) -> bool:
    if isinstance(value, bool) or bool in allowed:
        return isinstance(value, bool) and bool in allowed
    return isinstance(value, allowed) and (not isinstance(value, int | float) or value >= least)
