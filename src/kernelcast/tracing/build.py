"""A model and its inputs, by FILE.py:function or by a Hugging Face config."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from kernelcast.tracing.denoisers import denoiser
from kernelcast.tracing.frames import line_of
from kernelcast.tracing.hub import ModelInputs, config_dtype, enable_checkpointing, hub_model, required
from kernelcast.tracing.meta_model import building, fill_buffers, with_values
from kernelcast.tracing.run import DTYPES, PRECISIONS, call_model
from kernelcast.tracing.values import KnownValues

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class TraceRequest:
    """The model to trace, and its sizes. None: the model's own value, or a usual default."""

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
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KernelcastError(f"{name} must be 1 or more, not {value}")
        for name, known in (("dtype", tuple(DTYPES)), ("precision", PRECISIONS), ("logits", ("all", "last"))):
            if getattr(self, name) not in (None, *known):
                raise KernelcastError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        if self.mode == "inference" and self.precision == "mixed":
            raise KernelcastError("precision 'mixed' is of training: master weights are the optimizer's")
        if self.mode == "inference" and self.checkpointing:
            raise KernelcastError("checkpointing is of training: it recomputes in the backward pass")
        if self.mode == "training" and self.cache:
            raise KernelcastError("cache is of inference: training keeps no KV cache")

    @property
    def autocast(self) -> str:
        """The format of products under autocast, which keeps weights in fp32."""
        return self.dtype if self.dtype in ("bf16", "fp16") else "bf16"


@dataclass(frozen=True)
class BuiltModel:
    """A model on meta tensors with its inputs; ``loss`` where the function gave one. ``summary``: the choices that were
    made."""

    name: str
    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Any] | None = None
    precision: str = "pure"
    dtype: str = "bf16"  # of products
    summary: dict[str, Any] = field(default_factory=dict)


def build(request: TraceRequest) -> BuiltModel:
    """The model that ``request.what`` names."""
    path, colon, function = request.what.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), function, request)
    if request.what.endswith(".py"):
        raise KernelcastError(f"{request.what}: which function builds the model? give it as {request.what}:build")
    if colon and Path(f"{path}.py").is_file():
        raise KernelcastError(f"{request.what}: give the file, as in {path}.py:{function}")
    return _from_config(request)


# ---- a function of the user


def _from_file(path: Path, name: str, request: TraceRequest) -> BuiltModel:
    if not path.exists():
        raise KernelcastError(f"{path}: no such file")
    function = getattr(_imported(path), name, None)
    if not callable(function):
        raise KernelcastError(f"{path} has no function {name!r}")
    given = {"batch": request.batch, "seq": request.seq or 512, "dtype": _weights_dtype(request, "bf16"),
             "mode": request.mode}  # fmt: skip
    parameters = inspect.signature(function).parameters
    missing = required(parameters, given)
    if missing:
        raise KernelcastError(f"{path}:{name} requires {', '.join(missing)}; it may take {', '.join(given)}")
    if request.dtype is None and "dtype" in parameters and parameters["dtype"].default is not inspect.Parameter.empty:
        del given["dtype"]
    with building() as values:
        with _located(f"{path}:{name} fails"):
            built = function(**{key: value for key, value in given.items() if key in parameters})
        return _checked(f"{path.stem}:{name}", built, request, "dtype" in parameters, values)


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"kernelcast_traced_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise KernelcastError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with gpu_present(), _located(f"{path} does not import"):
            spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


@contextmanager
def _located(what: str) -> Iterator[None]:
    """An error of the user's program in one line that says where."""
    try:
        yield
    except KernelcastError:
        raise
    except Exception as error:
        name = type(error).__name__
        text = " ".join(str(error).split())[:300] or name
        raise KernelcastError(f"{line_of(error)}{what}: {name}: {text}") from error


def _checked(name: str, built: Any, request: TraceRequest, explicit: bool, values: KnownValues) -> BuiltModel:
    """A model with its inputs, in the requested dtype (unless the function took care of it)."""
    parts = built if isinstance(built, tuple) else (built,)
    model, notes = parts[0], []
    if not isinstance(model, nn.Module):
        raise KernelcastError(f"{name} must give (model, inputs) or (model, inputs, loss), not {type(built).__name__}")
    if len(parts) == 1:
        if not hasattr(getattr(model, "config", None), "model_type"):
            raise KernelcastError(f"{name} gives a model without inputs; let it give (model, inputs)")
        make = ModelInputs(model, request)
        inputs: Any = make.build()
        notes = make.notes
    else:
        inputs = tree_map(lambda x: with_values(x, values), parts[1])
    fill_buffers(model, values)
    if not isinstance(inputs, (torch.Tensor, tuple, list, Mapping)):
        raise KernelcastError(
            f"inputs must be a tensor, a list of arguments or a dictionary, not {type(inputs).__name__}"
        )
    precision = request.precision or "pure"
    convert = not explicit and (request.dtype is not None or precision == "autocast")
    if convert:
        dtype = _weights_dtype(request, "fp32")
        model = model.to(dtype)
        inputs = tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs)
    if request.checkpointing:
        enable_checkpointing(model, name)
    _initialise(model, inputs, name)
    weights = _main_dtype(model)
    why = f"converted to {weights}" if convert else f"in the model's own {weights}"
    products = request.autocast if precision == "autocast" else request.dtype or weights
    summary = _summary(model, inputs, weights, why, precision, notes, request)
    return BuiltModel(name, model, inputs, parts[2] if len(parts) > 2 else None, precision, products, summary)


def _initialise(model: nn.Module, inputs: Any, name: str) -> None:
    """Lazy modules take their sizes from a first pass."""
    if not any(nn.parameter.is_lazy(x) for x in model.parameters()):
        return
    on_meta = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, inputs)
    # modes are off: a weight without sizes cannot be recorded
    with _located(f"{name}: the pass that gives lazy modules their sizes fails"), _disable_current_modes():
        call_model(model, on_meta)


# ---- Hugging Face


def _from_config(request: TraceRequest) -> BuiltModel:
    """The model of transformers, or of diffusers, that a config.json or a bundled config describes."""
    name, raw = config_of(request.what)
    stored = config_dtype(raw)
    products = request.dtype or stored or "bf16"
    narrow = request.mode == "training" and DTYPES[products] in (torch.bfloat16, torch.float16)
    precision = request.precision or ("mixed" if narrow else "pure")
    why = "as given" if request.dtype else "as the config says" if stored else "where the config says nothing"
    dtype = DTYPES[products]
    if precision == "autocast":
        dtype, products, why = torch.float32, request.autocast, "as autocast keeps them"
    if "_class_name" in raw:
        model, inputs, notes = denoiser(raw, request, dtype)
    else:
        model, notes = hub_model(raw, request, dtype)
        make = ModelInputs(model, request)
        inputs = make.build()
        notes = [*make.notes, *notes]
    weights = _NAMES[dtype]
    summary = _summary(model, inputs, weights, f"{weights} {why}", precision, notes, request)
    return BuiltModel(name, model, inputs, None, precision, products, summary)


# ---- what was chosen


def _weights_dtype(request: TraceRequest, otherwise: str) -> torch.dtype:
    return torch.float32 if request.precision == "autocast" else DTYPES[request.dtype or otherwise]


def _main_dtype(model: nn.Module) -> str:
    """The format of most of its numbers."""
    sizes: Counter[str] = Counter()
    for x in model.parameters():
        if not nn.parameter.is_lazy(x):
            sizes[_NAMES.get(x.dtype, str(x.dtype).removeprefix("torch."))] += x.numel()
    return sizes.most_common(1)[0][0] if sizes else "fp32"


def _summary(
    model: nn.Module, inputs: Any, weights: str, why: str, precision: str, notes: list[str], request: TraceRequest
) -> dict[str, Any]:
    if not isinstance(inputs, Mapping):
        inputs = dict(enumerate(inputs if isinstance(inputs, (tuple, list)) else [inputs]))
    shapes = {str(key): list(x.shape) for key, x in inputs.items() if isinstance(x, torch.Tensor)}
    plain = {str(key): x for key, x in inputs.items() if isinstance(x, (bool, int, str))}
    return {
        "class": type(model).__name__, "inputs": shapes | plain, "dtype": weights, "dtype_why": why,
        "precision": precision,
        **({"autocast": request.autocast} if precision == "autocast" else {}),
        **({"cache": plain["use_cache"]} if "use_cache" in plain else {}),
        **({"logits": "last" if plain.get("logits_to_keep") else "all"} if hasattr(model, "lm_head") else {}),
        **({"notes": notes} if notes else {}), "trains": request.mode == "training",
    }  # fmt: skip
