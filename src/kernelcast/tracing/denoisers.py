"""A denoiser of a diffusion pipeline on meta tensors, built by diffusers from its config: a pass of it is one step.

Which inputs a class takes is data: models/traced.toml."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kernelcast.errors import KernelcastError
from kernelcast.models.catalogue import traced_table
from kernelcast.tracing.frames import line_of
from kernelcast.tracing.hub import NO_LABELS, convert, make_torchvision_importable
from kernelcast.tracing.meta_model import building, fill_buffers

if TYPE_CHECKING:
    from kernelcast.tracing.build import TraceRequest

_LATENT = 8  # pixels of a latent's side: three halvings of the autoencoder
_PATCH = 2  # latents of a patch's side


def denoiser(
    raw: Mapping[str, Any], request: TraceRequest, dtype: torch.dtype
) -> tuple[Any, dict[str, Any], list[str]]:
    """The model of a config that names a class of diffusers, its inputs, and notes on what had to be chosen."""
    name = str(raw["_class_name"])
    entry = traced_table()["denoisers"].get(name)
    if entry is None:
        raise KernelcastError(
            f"{request.what} is of diffusers' class {name}: give it and its inputs by FILE.py:function"
        )
    if importlib.util.find_spec("diffusers") is None:
        raise KernelcastError("tracing a denoiser needs diffusers: pip install 'kernelcast[torch,diffusers]'")
    if request.cache or request.logits:
        raise KernelcastError(f"{'cache' if request.cache else 'logits'}: {name} has none")
    make_torchvision_importable()
    try:
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
        with building() as values:
            model = getattr(diffusers, name).from_config({key: value for key, value in raw.items() if key[0] != "_"})
            fill_buffers(model, values)
            convert(model, dtype, getattr(model, "_keep_in_fp32_modules", None) or ())
            if request.checkpointing:
                model.enable_gradient_checkpointing()
    except Exception as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise KernelcastError(f"{line_of(error)}diffusers does not build {request.what}: {text}") from error
    sizes = _sizes(model.config, entry, request)
    given = {key: shape for key, shape in entry["inputs"].items()
             if model.config.get(entry.get("where", {}).get(key, ""), True)}  # fmt: skip
    return model, _tensors(given, sizes, model.config, dtype), [NO_LABELS] * (request.mode == "training")


def _sizes(config: Mapping[str, Any], entry: Mapping[str, Any], request: TraceRequest) -> dict[str, int]:
    own = config.get("sample_size")
    image = request.image or (own * _LATENT if isinstance(own, int) else entry["image"])
    height, width = image if isinstance(image, list) else (image, image)
    for side in (height, width):
        if side % (_LATENT * _PATCH):
            raise KernelcastError(f"`image_size` must be a multiple of {_LATENT * _PATCH} pixels, not {side}")
    return {
        "batch": request.batch, "text": request.seq or entry["text"], "height": height // _LATENT,
        "width": width // _LATENT, "patches": height * width // (_LATENT * _PATCH) ** 2,
        "frames": entry.get("frames", 1),
    }  # fmt: skip


def _tensors(shapes: Any, sizes: Mapping[str, int], config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    if isinstance(shapes, Mapping):
        return {key: _tensors(each, sizes, config, dtype) for key, each in shapes.items()}
    numbers = [size if isinstance(size, int) else sizes.get(size) or int(config[size]) for size in shapes]
    return torch.empty(numbers, dtype=dtype, device="meta")
