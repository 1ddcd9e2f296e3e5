"""What a person names on the command line, as a model and its inputs: FILE.py:function, or a Hugging Face config."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from kernelcast.errors import KernelcastError
from kernelcast.models.catalogue import config as config_of
from kernelcast.tracing.cuda_like import gpu_present
from kernelcast.tracing.frames import line_of
from kernelcast.tracing.hub import ModelInputs, model_of, own_format
from kernelcast.tracing.meta_model import building, fill_buffers, with_values
from kernelcast.tracing.run import DTYPES, PRECISIONS
from kernelcast.tracing.values import KnownValues

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class TraceRequest:
    """What is to be traced, and its sizes. None: what the model itself says, or what is usual for its kind."""

    what: str
    batch: int = 1
    seq: int | None = None
    dtype: str | None = None
    mode: str = "inference"
    checkpointing: bool = False
    precision: str | None = None
    cache: bool | None = None
    logits: str | None = None  # all or last
    image: int | None = None  # pixels of a side

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "image"):
            if (getattr(self, name) or 1) < 1 or getattr(self, name) == 0:
                raise KernelcastError(f"--{name} must be 1 or more, not {getattr(self, name)}")
        for name, known in (("dtype", tuple(DTYPES)), ("precision", PRECISIONS), ("logits", ("all", "last"))):
            if getattr(self, name) not in (None, *known):
                raise KernelcastError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        if self.mode == "inference" and self.precision == "mixed":
            raise KernelcastError("--precision mixed is of training: master weights are the optimizer's")


@dataclass(frozen=True)
class BuiltModel:
    """A model on meta tensors with its inputs; ``loss`` where the function gave one. ``told``: what was chosen."""

    name: str
    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Any] | None = None
    precision: str = "pure"
    dtype: str = "bf16"  # of products
    told: dict[str, Any] = field(default_factory=dict)


def build(asked: TraceRequest) -> BuiltModel:
    """The model that ``asked.what`` names."""
    path, colon, function = asked.what.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), function, asked)
    if asked.what.endswith(".py"):
        raise KernelcastError(f"{asked.what}: which function builds the model? give it as {asked.what}:build")
    return _from_config(asked)


# ---- a function of a person's own ----


def _from_file(path: Path, function: str, asked: TraceRequest) -> BuiltModel:
    if not path.exists():
        raise KernelcastError(f"{path}: no such file")
    found = getattr(_imported(path), function, None)
    if not callable(found):
        raise KernelcastError(f"{path} has no function {function!r}")
    given = {"batch": asked.batch, "seq": asked.seq or 512, "dtype": _weights_format(asked, "bf16"), "mode": asked.mode}
    wanted = inspect.signature(found).parameters
    missing = [name for name, p in wanted.items() if p.default is p.empty and name not in given
               and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    if missing:
        raise KernelcastError(f"{path}:{function} asks for {', '.join(missing)}; it may ask for {', '.join(given)}")
    if asked.dtype is None and "dtype" in wanted and wanted["dtype"].default is not inspect.Parameter.empty:
        del given["dtype"]
    with building() as values:
        try:
            made = found(**{name: value for name, value in given.items() if name in wanted})
        except KernelcastError:
            raise
        except Exception as error:
            raise KernelcastError(
                f"{line_of(error)}{path}:{function} fails: {type(error).__name__}: {_one_line(error)}"
            ) from error
        return _checked(f"{path.stem}:{function}", made, asked, "dtype" in wanted, values)


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"kernelcast_traced_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise KernelcastError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with gpu_present():
            spec.loader.exec_module(module)
    except Exception as error:
        place = line_of(error)
        raise KernelcastError(f"{place}{path} does not import: {type(error).__name__}: {_one_line(error)}") from error
    finally:
        sys.path.pop(0)
    return module


def _checked(name: str, made: Any, asked: TraceRequest, explicit: bool, values: KnownValues) -> BuiltModel:
    """A model with its inputs, in the format that is asked for (unless the function took care of it)."""
    parts = made if isinstance(made, tuple) else (made,)
    model, notes = parts[0], []
    if not isinstance(model, nn.Module):
        raise KernelcastError(f"{name} must give (model, inputs) or (model, inputs, loss), not {type(made).__name__}")
    if len(parts) == 1:
        if not hasattr(getattr(model, "config", None), "model_type"):
            raise KernelcastError(f"{name} gives a model without inputs; let it give (model, inputs)")
        make = ModelInputs(model, asked)
        inputs: Any = make.build()
        notes = make.notes
    else:
        inputs = tree_map(lambda x: with_values(x, values), parts[1])
    fill_buffers(model, values)
    if not isinstance(inputs, (torch.Tensor, tuple, list, Mapping)):
        raise KernelcastError(
            f"inputs must be a tensor, a list of arguments or a dictionary, not {type(inputs).__name__}"
        )
    precision = asked.precision or "pure"
    convert = asked.dtype is not None or precision == "autocast"
    if convert and not explicit:
        wanted = _weights_format(asked, "fp32")
        model = model.to(wanted)
        inputs = tree_map(
            lambda x: x.to(wanted) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs
        )
    _initialise(model, inputs, name)
    own = _format_of(model)
    why = f"converted to {own}" if convert and not explicit else f"in the model's own {own}"
    dtype = (asked.dtype or "bf16") if precision == "autocast" else asked.dtype or own
    told = _told(model, inputs, own, why, precision, notes) | {"trains": asked.mode == "training"}
    return BuiltModel(name, model, inputs, parts[2] if len(parts) > 2 else None, precision, dtype, told)


def _initialise(model: nn.Module, inputs: Any, name: str) -> None:
    """Lazy modules take their sizes from a first pass."""
    if not any(nn.parameter.is_lazy(x) for x in model.parameters()):
        return
    given = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, inputs)
    try:
        with _disable_current_modes():  # a weight without sizes is nothing to look at
            if isinstance(given, Mapping):
                model(**given)
            else:
                model(*given) if isinstance(given, (tuple, list)) else model(given)
    except Exception as error:
        raise KernelcastError(
            f"{line_of(error)}{name}: the pass that gives lazy modules their sizes fails: {_one_line(error)}"
        ) from error


# ---- Hugging Face ----


def _from_config(asked: TraceRequest) -> BuiltModel:
    """Hugging Face's own model of a config.json, or of a bundled one."""
    name, raw = config_of(asked.what)
    own = own_format(raw)
    usual = asked.dtype or own or "bf16"
    narrow = asked.mode == "training" and DTYPES[usual] in (torch.bfloat16, torch.float16)
    precision = asked.precision or ("mixed" if narrow else "pure")
    format_ = torch.float32 if precision == "autocast" else DTYPES[usual]
    model, notes = model_of(raw, asked, format_)
    make = ModelInputs(model, asked)
    inputs = make.build()
    why = "as asked" if asked.dtype else "as the config says" if own else "where the config says nothing"
    if precision == "autocast":
        usual, why = asked.dtype or "bf16", "as autocast keeps them"
    make.notes.extend(notes)
    told = _told(model, inputs, _NAMES[format_], f"{_NAMES[format_]} {why}", precision, make.notes)
    told["trains"] = asked.mode == "training"
    return BuiltModel(name, model, inputs, None, precision, usual, told)


# ---- what is said of it ----


def _weights_format(asked: TraceRequest, else_: str) -> torch.dtype:
    return torch.float32 if asked.precision == "autocast" else DTYPES[asked.dtype or else_]


def _format_of(model: nn.Module) -> str:
    """The format of most of its numbers."""
    sizes: dict[str, int] = {}
    for x in model.parameters():
        if not nn.parameter.is_lazy(x):
            named = _NAMES.get(x.dtype, str(x.dtype).removeprefix("torch."))
            sizes[named] = sizes.get(named, 0) + x.numel()
    return max(sizes, key=lambda key: sizes[key]) if sizes else "fp32"


def _told(model: nn.Module, inputs: Any, own: str, why: str, precision: str, notes: list[str]) -> dict[str, Any]:
    named = (
        inputs
        if isinstance(inputs, Mapping)
        else dict(enumerate(inputs))
        if isinstance(inputs, (tuple, list))
        else {0: inputs}
    )
    shapes = {str(key): list(x.shape) for key, x in named.items() if isinstance(x, torch.Tensor)}
    plain = {str(key): x for key, x in named.items() if isinstance(x, (bool, int, str))}
    return {
        "class": type(model).__name__, "inputs": shapes | plain, "dtype": own, "dtype_why": why, "precision": precision,
        **({"cache": plain["use_cache"]} if "use_cache" in plain else {}),
        **({"logits": "last" if plain.get("logits_to_keep") else "all"} if hasattr(model, "lm_head") else {}),
        **({"notes": notes} if notes else {}),
    }  # fmt: skip


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
