"""Kernel calls: frozen parameter classes, their registry, and a column view of many calls at once.

A family is one file in this folder: a subclass of ``Kernel`` with an ``op`` name, fields made by ``size``, ``real``,
``flag``, ``choice`` and ``lengths``, and a ``work`` that maps columns of parameters to ``Work``. A file is
imported when one of its ops is asked for (``Registry``).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.ops.dtypes import DTYPES, DType, canonical_dtype
from kernelcast.ops.op_names import unknown_op
from kernelcast.ops.work import Array, Works

MAX_SIZE = 2**31 - 1  # kernels index with 32 bits


@dataclass(frozen=True)
class Parameter:
    """Type, range and help of a parameter. CLI, table reader and docs are made from it."""

    name: str
    type: str  # size | real | flag | choice | lengths
    help: str
    default: Any = dataclasses.MISSING
    low: float = 1
    high: float = MAX_SIZE
    options: tuple[str, ...] = ()
    file: Callable[[str], object] | None = None  # reads a choice that ends in .toml: a file of the user
    unset: str | None = None  # what None stands for: an option, or the name of the parameter whose value it takes
    optional: bool = False

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    def check(self, value: object) -> Any:
        """The value in the parameter's type, or an error with the value and what would be right."""
        if value is None and self.optional:
            return None
        if self.type == "choice":
            if self.file is not None and isinstance(value, str) and value.endswith(".toml"):
                self.file(value)
            elif value not in self.options:
                dtype = canonical_dtype(value) if isinstance(value, str) else value
                if dtype not in self.options:
                    raise unknown(self.name, value, self.options)
                return dtype
            return value
        if self.type == "flag":
            if isinstance(value, bool | np.bool_) or value in (0, 1):
                return bool(value)
            raise KernelcastError(f"{self.name} must be true or false, not {value!r}")
        if self.type == "lengths":
            if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str) or len(value) == 0:
                raise KernelcastError(f"{self.name} must be a list of one or more lengths, not {value!r}")
            return tuple(int(self._check_number(v)) for v in value)
        number = self._check_number(value)
        return int(number) if self.type == "size" else number

    def _check_number(self, value: object) -> float:
        ok = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        if not ok or not math.isfinite(value):  # type: ignore[arg-type]
            raise KernelcastError(f"{self.name} must be a number, not {value!r}")
        number = float(value)  # type: ignore[arg-type]
        if self.type != "real" and number != int(number):
            raise KernelcastError(f"{self.name} must be a whole number, not {value!r}")
        if not self.low <= number <= self.high:
            low, high = (f"{x:,.0f}" if x == int(x) and x < 1e16 else f"{x:g}" for x in (self.low, self.high))
            raise KernelcastError(f"{self.name} must be from {low} to {high}, not {value!r}")
        return number


def _field(default: Any, **spec: Any) -> Any:
    if default is dataclasses.MISSING:
        return field(metadata=spec)
    return field(default=default, metadata=spec)


def size(help: str, *, default: Any = dataclasses.MISSING, low: int = 1, high: int = MAX_SIZE) -> Any:
    """A whole number. ``default=None`` makes it optional."""
    return _field(default, type="size", help=help, low=low, high=high)


def real(help: str, *, default: Any = dataclasses.MISSING, low: float = 0.0, high: float = 1e18) -> Any:
    return _field(default, type="real", help=help, low=low, high=high)


def flag(help: str, *, default: bool) -> Any:
    return _field(default, type="flag", help=help)


def choice(
    help: str,
    options: Sequence[str],
    *,
    default: Any = dataclasses.MISSING,
    unset: str | None = None,
    file: Callable[[str], object] | None = None,
) -> Any:
    """One of a few options, or a file that ``file`` reads. Calls of a table are grouped by it, so ``work`` sees one
    value."""
    return _field(default, type="choice", help=help, options=tuple(options), unset=unset, file=file)


def lengths(help: str, *, default: None) -> Any:
    """An optional list of lengths (a ragged batch); JSON in a table."""
    return _field(default, type="lengths", help=help)


@dataclass(frozen=True)
class Ragged:
    """Lists of different lengths, one per call, end to end: list i is flat[starts[i]:starts[i+1]]."""

    flat: Array
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Ragged:
        counts = [len(x) for x in lists]
        flat = np.fromiter((v for x in lists for v in x), dtype=np.float64, count=sum(counts))
        return cls(flat, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """The lists of several, concatenated."""
        counts = np.concatenate([part.counts for part in parts])
        return cls(np.concatenate([part.flat for part in parts]), np.concatenate([[0], np.cumsum(counts)]))

    @property
    def counts(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    def part(self, start: int, stop: int) -> Ragged:
        starts = self.starts[start : stop + 1]
        return Ragged(self.flat[starts[0] : starts[-1]], starts - starts[0])

    def take(self, rows: NDArray[np.intp]) -> Ragged:
        counts = self.counts[rows]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        at = np.arange(starts[-1]) + np.repeat(self.starts[:-1][rows] - starts[:-1], counts)
        return Ragged(self.flat[at], starts)


@dataclass(frozen=True)
class Calls:
    """Many calls of one op as columns: numbers vary by call, choices (dtype, backend, …) are the same for all.

    A number that is not given is NaN; ``lists`` holds a lengths parameter only when it is given.
    """

    count: int
    numbers: Mapping[str, Array]
    choices: Mapping[str, Any]
    lists: Mapping[str, Ragged] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Array:
        return self.numbers[name]

    @property
    def dtype(self) -> DType:
        return DTYPES[self.choices["dtype"]]

    def choice(self, name: str) -> Any:
        return self.choices.get(name)

    def given(self, name: str, default: Array | float) -> Array:
        """An optional number, with ``default`` where it was not given."""
        column = self.numbers[name]
        return np.where(np.isnan(column), default, column)

    def part(self, start: int, stop: int) -> Calls:
        return Calls(
            count=min(stop, self.count) - start,
            numbers={k: v[start:stop] for k, v in self.numbers.items()},
            choices=self.choices,
            lists={k: v.part(start, min(stop, self.count)) for k, v in self.lists.items()},
        )

    def take(self, rows: NDArray[np.intp]) -> Calls:
        """Some of the calls, by number."""
        return Calls(
            count=len(rows),
            numbers={k: v[rows] for k, v in self.numbers.items()},
            choices=self.choices,
            lists={k: v.take(rows) for k, v in self.lists.items()},
        )


# torch_eager: one eager operator between two events, launch overhead inside
STACKS = ("torch", "torch_eager", "vllm", "sglang", "trtllm", "flashinfer", "nccl")


Configuration = Mapping[str, str | None]
"""What evidence is kept by: stack, backend, formats, phase, …; None: not given."""
ConfigurationColumns = Mapping[str, str | NDArray[Any] | None]
"""The same of many calls, by call where it varies."""
Examples = tuple[Mapping[str, Any], ...]
Conflicts = list[tuple[NDArray[np.bool_], str]]
"""Broken rules between parameters: (mask of the calls that break it, what is wrong)."""
BoundingCalls = list[tuple[NDArray[np.intp], Calls]]
"""Calls by number, and for each of them another call that bounds its time."""


def conflict(broken: NDArray[np.bool_], text: str, columns: Mapping[str, NDArray[Any]]) -> Conflicts:
    """A rule, if any call breaks it; ``text`` shows the numbers of the first call that does: "k {k:g} is odd"."""
    if not broken.any():
        return []
    first = int(np.argmax(broken))
    return [(broken, text.format_map({name: column[first] for name, column in columns.items()}))]


def not_multiple(columns: Mapping[str, Array], name: str, of: str) -> Conflicts:
    """Calls where ``name`` is no multiple of ``of``."""
    text = f"{name} {{{name}:g}} is no multiple of {of} {{{of}:g}}"
    return conflict(np.mod(columns[name], columns[of]) != 0, text, columns)


def more_than(columns: Mapping[str, Array], name: str, other: str) -> Conflicts:
    """Calls where ``name`` is more than ``other``."""
    return conflict(columns[name] > columns[other], f"{name} {{{name}:g}} is more than {other} {{{other}:g}}", columns)


def labels(where: NDArray[np.bool_] | bool, yes: str = "yes", no: str = "no") -> NDArray[Any]:
    """A column of a configuration from a mask of the calls."""
    return np.where(where, yes, no).astype(object)


if TYPE_CHECKING:
    from dataclasses import dataclass as _frozen
else:

    def _frozen(**options: bool) -> Callable[[type], type]:
        """A dataclass that has the methods of a frozen one from ``Kernel``."""
        return dataclass(init=False, repr=False, eq=False, kw_only=True)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(size, real, flag, choice, lengths))
@_frozen(frozen=True, kw_only=True)
class Kernel:
    """One frozen kernel call. Subclasses add parameters and need no decorator: each is made a dataclass when it
    is defined. Construction validates every parameter. The methods of a frozen dataclass are written once here, because
    generating them for every op takes 60 ms of every start."""

    op: ClassVar[str] = ""
    family: ClassVar[str] = ""  # ops whose efficiency is learned together; "": the op alone
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    examples: ClassVar[Examples] = ()
    parameters: ClassVar[Mapping[str, Parameter]] = {}
    unset_choices: ClassVar[tuple[str, ...]] = ()  # parameters with ``unset``
    model_sizes: ClassVar[tuple[str, ...]] = ()  # fixed by the model, so that an engine may select its kernel by them
    batch_parameter: ClassVar[str] = ""  # the size that scales the work with the batch
    timed_as_sum: ClassVar[bool] = False  # many kernels, which may overlap: measured as the sum of their times
    trailing_parameters: ClassVar[tuple[str, ...]] = ()  # of a shared base, listed after those of the subclass

    dtype: str = choice("dtype of the operands", tuple(DTYPES), default="bf16")
    stack: str | None = choice("software stack that runs the kernel", STACKS, default=None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.get_annotations(cls):  # else its parameters are those of its base
            _frozen(frozen=True, kw_only=True)(cls)
        cls.parameters = _parameters(cls)
        cls.unset_choices = tuple(name for name, parameter in cls.parameters.items() if parameter.unset)
        if cls.__dict__.get("op"):
            cls.family = cls.family or cls.op
            REGISTRY[cls.op] = cls

    def __init__(self, **values: Any) -> None:
        parameters = self.parameters
        for name in values.keys() - parameters.keys():
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
        for name, parameter in parameters.items():
            value = values.get(name, parameter.default)
            if value is dataclasses.MISSING:
                raise TypeError(f"{type(self).__name__}() missing required keyword argument {name!r}")
            self.__dict__[name] = parameter.check(value)
        problems = self.conflicts(columns_of([self]))
        if problems:
            raise KernelcastError(f"{self.op}: {problems[0][1]}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.__dict__.values())))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        """Rules between parameters that calls break, most often by ``conflict``."""
        return []

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        """Features of shape for the learned efficiency, beside the machine's; without units."""
        specs = parameters_of(cls).values()
        sizes = [p.name for p in specs if p.type == "size" and p.required]
        return {
            **{f"log_{name}": np.log2(calls[name] + 1) for name in sizes},
            **{f"grain_{name}": grain(calls[name]) for name in sizes},
            **{p.name: calls[p.name] for p in specs if p.type == "flag"},
        }

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        """Every choice, and what follows from the numbers (prefill or decode)."""
        return dict(calls.choices)

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        """The configuration with defaults for what is not given, and with the stack's names for backends."""
        filled = dict(configuration)
        for name in cls.unset_choices:
            unset = cls.parameters[name].unset
            filled[name] = filled[name] or filled.get(str(unset), unset)
        return filled

    @classmethod
    def alike(cls, name: str, value: str | None, other: str | None) -> bool:
        """Whether two values of a choice take the same time, so that what was measured of one is of the other: what is
        stored in fp16 or bf16 has the same bytes (``dtype`` names the arithmetic too)."""
        return name != "dtype" and {value, other} == {"fp16", "bf16"}

    @classmethod
    def with_choices(cls, calls: Calls, configuration: Configuration) -> Calls:
        """The calls with the configuration's values, as far as their choices have them."""
        options = {name: (None, *parameters_of(cls)[name].options) for name in calls.choices}
        chosen = {name: value for name, value in configuration.items() if value in options.get(name, ())}
        return dataclasses.replace(calls, choices={**calls.choices, **chosen})

    @classmethod
    def sizes(cls, calls: Calls) -> Mapping[str, Array]:
        """The numbers whose measured ranges evidence keeps; NaN where not given."""
        return {p.name: calls[p.name] for p in parameters_of(cls).values() if p.type in ("size", "real", "flag")}

    @classmethod
    def not_faster_than(cls, calls: Calls) -> BoundingCalls:
        """Calls with less work: these cannot be faster, whatever was measured of single calls."""
        return []

    @classmethod
    def not_slower_than(cls, calls: Calls) -> BoundingCalls:
        """Calls with more work: these cannot be slower."""
        return []

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        """Tasks and demand of these calls on this GPU's candidate tiles."""
        raise TypeError(f"{cls.__name__} defines no work")


def grain(sizes: Array) -> Array:
    """log2 of the largest power of two, up to 128, that divides each size: vectors need alignment."""
    return twos(sizes, 128)


def twos(sizes: Array, most: int) -> Array:
    """log2 of the largest power of two, up to ``most``, that divides each whole number."""
    whole = sizes.astype(np.int64) | most
    return _TWOS[whole & -whole]


_TWOS = np.full(257, np.nan)  # log2 of the powers of two
_TWOS[2 ** np.arange(9)] = np.arange(9)


class Registry(MutableMapping[str, type[Kernel]]):
    """Kernel classes by op. A file of this folder is imported when one of its ops is asked for, all of them when ops
    are listed: a start needs few of the hundred ops, and importing all takes a tenth of a second."""

    def __init__(self) -> None:
        self._imported: dict[str, type[Kernel]] = {}
        self._files = [path for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_")]

    def __setitem__(self, op: str, kernel: type[Kernel]) -> None:
        self._imported[op] = kernel

    def __delitem__(self, op: str) -> None:
        del self._imported[op]

    def import_files(self, containing: str = "") -> None:
        for path in [path for path in self._files if containing in path.read_text(encoding="utf-8")]:
            self._files.remove(path)
            importlib.import_module(f"{__package__}.{path.stem}")

    def __getitem__(self, op: str) -> type[Kernel]:
        if op not in self._imported:
            self.import_files(containing=f'"{op}"')
        return self._imported[op]

    def class_named(self, name: str) -> type[Kernel] | None:
        self.import_files(containing=f"class {name}(")
        by_name = {kernel.__name__: kernel for kernel in self._imported.values()}
        if name not in by_name:  # classes that are made from a table are in no such line
            by_name = {kernel.__name__: kernel for kernel in self.values()}
        return by_name.get(name)

    def __iter__(self) -> Iterator[str]:
        self.import_files()
        return iter(sorted(self._imported))

    def __len__(self) -> int:
        return len(list(iter(self)))


REGISTRY = Registry()


def _parameters(kernel: type[Kernel]) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for f in dataclasses.fields(kernel):
        spec = {**f.metadata, **({"options": kernel.dtypes} if f.name == "dtype" else {})}
        parameters[f.name] = Parameter(name=f.name, default=f.default, optional=f.default is None, **spec)
    shared = {name: parameters.pop(name) for name in (*kernel.trailing_parameters, "dtype", "stack")}
    return {**parameters, **shared}


def parameters_of(kernel: type[Kernel]) -> Mapping[str, Parameter]:
    """The parameters of a family by name: its trailing ones, dtype and stack come last."""
    return kernel.parameters


def kernel_class(op: str) -> type[Kernel]:
    if op not in REGISTRY:
        raise unknown_op(op, REGISTRY)
    return REGISTRY[op]


def kernel(op: str, **values: Any) -> Kernel:
    """The call ``op`` with these parameters; names what is missing or unknown."""
    cls = kernel_class(op)
    known = parameters_of(cls)
    for name in values:
        if name not in known:
            raise KernelcastError(f"{op}: {unknown('parameter', name, known)}")
    missing = [p.name for p in known.values() if p.required and values.get(p.name) is None]
    if missing:
        raise KernelcastError(f"{op} needs {', '.join(missing)}")
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return cls(**given)
    except KernelcastError as error:
        text = str(error)
        raise KernelcastError(text if text.startswith(f"{op}: ") else f"{op}: {text}") from None


def columns_of(calls: Sequence[Kernel]) -> Calls:
    """Calls of one class that agree in every choice, as columns."""
    numbers: dict[str, Array] = {}
    choices: dict[str, Any] = {}
    lists: dict[str, Ragged] = {}
    for name, parameter in parameters_of(type(calls[0])).items():
        values = [getattr(c, name) for c in calls]
        if parameter.type == "choice":
            choices[name] = values[0]
        elif parameter.type == "lengths":
            if values[0] is not None:
                lists[name] = Ragged.of(values)
        else:
            numbers[name] = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
    return Calls(count=len(calls), numbers=numbers, choices=choices, lists=lists)
