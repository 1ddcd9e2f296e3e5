"""What a person names on the command line, as a model and its inputs: FILE.py:function, or a Hugging Face config."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from kernelcast.errors import KernelcastError
from kernelcast.networks.catalogue import config as config_of
from kernelcast.tracing.cuda_like import gpu_present

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ENCODERS = ("bert", "roberta", "distilbert", "electra", "deberta", "albert", "xlm-roberta", "modernbert")


@dataclass(frozen=True)
class Asked:
    """What is to be traced, and its sizes."""

    what: str
    batch: int = 1
    seq: int = 512
    dtype: str = "bf16"
    mode: str = "inference"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "seq"):
            if getattr(self, name) < 1:
                raise KernelcastError(f"--{name} must be 1 or more, not {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise KernelcastError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")


@dataclass(frozen=True)
class Built:
    """A model on meta tensors with its inputs; ``loss`` where the function gave one."""

    name: str
    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Any] | None = None


def build(asked: Asked) -> Built:
    """The model that ``asked.what`` names."""
    path, colon, function = asked.what.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), function, asked)
    if asked.what.endswith(".py"):
        raise KernelcastError(f"{asked.what}: which function builds the model? give it as {asked.what}:build")
    return _from_config(asked)


def _from_file(path: Path, function: str, asked: Asked) -> Built:
    if not path.exists():
        raise KernelcastError(f"{path}: no such file")
    found = getattr(_imported(path), function, None)
    if not callable(found):
        raise KernelcastError(f"{path} has no function {function!r}")
    known = {"batch": asked.batch, "seq": asked.seq, "dtype": DTYPES[asked.dtype], "mode": asked.mode}
    wanted = inspect.signature(found).parameters
    missing = [name for name, p in wanted.items() if p.default is p.empty and name not in known
               and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    if missing:
        raise KernelcastError(f"{path}:{function} asks for {', '.join(missing)}; it may ask for {', '.join(known)}")
    with torch.device("meta"), gpu_present():
        try:
            made = found(**{name: value for name, value in known.items() if name in wanted})
        except Exception as error:
            raise KernelcastError(f"{path}:{function} fails: {type(error).__name__}: {_one_line(error)}") from error
    return _checked(f"{path.stem}:{function}", made, asked, explicit="dtype" in wanted)


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
        raise KernelcastError(f"{path} does not import: {type(error).__name__}: {_one_line(error)}") from error
    finally:
        sys.path.pop(0)
    return module


def _checked(name: str, made: Any, asked: Asked, explicit: bool) -> Built:
    """A model with its inputs, in the format that is asked for (unless the function took care of it)."""
    parts = made if isinstance(made, tuple) else (made,)
    model = parts[0]
    if not isinstance(model, nn.Module):
        raise KernelcastError(f"{name} must give (model, inputs) or (model, inputs, loss), not {type(made).__name__}")
    if len(parts) == 1:
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "vocab_size"):
            raise KernelcastError(f"{name} gives a model without inputs; let it give (model, inputs)")
        inputs: Any = _tokens(config.vocab_size, asked, labels=True)
    else:
        inputs = parts[1]
    if not explicit:
        wanted = DTYPES[asked.dtype]
        model = model.to(wanted)
        inputs = tree_map(
            lambda x: x.to(wanted) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs
        )
    if not isinstance(inputs, (torch.Tensor, tuple, list, Mapping)):
        raise KernelcastError(
            f"inputs must be a tensor, a list of arguments or a dictionary, not {type(inputs).__name__}"
        )
    return Built(name, model, inputs, parts[2] if len(parts) > 2 else None)


def _from_config(asked: Asked) -> Built:
    """Hugging Face's own model of a config.json, or of a bundled one."""
    name, raw = config_of(asked.what)
    if importlib.util.find_spec("transformers") is None:
        raise KernelcastError("tracing a Hugging Face config needs transformers: pip install 'kernelcast[torch]'")
    import transformers

    transformers.logging.set_verbosity_error()  # it speaks of losses, not of errors
    kind = raw.get("model_type")
    if not kind:
        raise KernelcastError(f"{asked.what} has no model_type, so it is no Hugging Face config of a model")
    try:
        config = transformers.AutoConfig.for_model(**raw)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        auto = transformers.AutoModelForMaskedLM if kind in _ENCODERS else transformers.AutoModelForCausalLM
        with torch.device("meta"), gpu_present():
            model = auto.from_config(text, dtype=DTYPES[asked.dtype])
    except Exception as error:
        raise KernelcastError(f"transformers does not build {asked.what}: {_one_line(error)}") from error
    if asked.checkpointing:
        model.gradient_checkpointing_enable()
    longest = getattr(text, "max_position_embeddings", None)
    if longest and asked.seq > longest:
        raise KernelcastError(f"--seq {asked.seq:,} exceeds the {longest:,} positions of {name}")
    inputs = _tokens(text.vocab_size, asked, labels=asked.mode == "training")
    if kind not in _ENCODERS:
        inputs["use_cache"] = False
        if asked.mode == "inference":
            inputs["logits_to_keep"] = 1
    return Built(name, model, inputs)


def _tokens(vocab: int, asked: Asked, labels: bool) -> dict[str, Any]:
    tokens = torch.randint(min(4, vocab - 1), vocab, (asked.batch, asked.seq), device="cpu")
    return {"input_ids": tokens, **({"labels": tokens} if labels and asked.mode == "training" else {})}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
