"""Number formats of a served model: its matrices, the numbers between them, and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.models.architecture import Architecture
from kernelcast.models.layers import Dense
from kernelcast.ops.dtypes import find_dtype, supports_dtype

WEIGHTS = ("bf16", "fp16", "fp32", "tf32", "fp8", "fp8_block", "int8", "int4", "nvfp4", "int8_wo", "mxfp4", "mxfp4_fp8")
# What a checkpoint's matrices run as where the GPU has no arithmetic of their format: weights alone are narrow (Marlin)
WEIGHT_ONLY = {"nvfp4": "int4", "fp8": "int8_wo", "fp8_block": "int8_wo", "int8": "int8_wo"}
CACHE = ("bf16", "fp16", "fp8")
_WHOLE = ("bf16", "fp16", "fp32", "tf32")


@dataclass(frozen=True)
class Precision:
    """``weights``: format of the matrices of layers (the head, the router and the embedding stay in ``between``).
    ``experts`` and ``mlp``: of routed experts, and of dense blocks and shared experts, where they differ. ``cache``: of
    keys and values, default as ``between``. ``stored``: as the checkpoint is, whatever arithmetic the GPU has."""

    weights: str = "bf16"
    cache: str | None = None
    experts: str | None = None
    mlp: str | None = None
    stored: bool = False

    def __post_init__(self) -> None:
        for name in (self.weights, self.experts or self.weights, self.mlp or self.weights):
            if name not in WEIGHTS:
                raise unknown("number format of weights", name, WEIGHTS)
        if self.cache is not None and self.cache not in CACHE:
            raise unknown("number format of the KV cache", self.cache, CACHE)
        if self.cache == "fp8" and self.between in ("fp32", "tf32"):
            raise KernelcastError("an fp8 KV cache needs 16-bit activations")

    @classmethod
    def of(cls, model: Architecture, weights: str | None = None, cache: str | None = None) -> Precision:
        """As asked, else as the checkpoint stores its matrices. Of one that is stored in fp8 by blocks, fp8 is that."""
        stored = model.quantization
        in_blocks = stored is not None and stored.weights == "fp8_block" and weights in ("fp8", "fp8_block")
        own = stored is not None and (weights is None or in_blocks)
        if stored is None or not own:
            return cls(weights or "bf16", cache)
        if stored.weights is None:
            raise KernelcastError(f"{model.name} ships as {stored.unknown}, which has no kernels here; give --dtype")
        blocks = [run.layer.mlp for run in model.layer_kinds]
        dense = any(isinstance(block, Dense) or (block is not None and block.shared) for block in blocks)
        mlp = stored.mlp if dense else None
        return cls(stored.weights, cache or stored.cache, stored.experts, mlp, stored=True)

    @property
    def between(self) -> str:
        """Activations between layers."""
        return self.weights if self.weights in _WHOLE else "bf16"

    @property
    def quantised(self) -> bool:
        """Whether activations change format before a product."""
        return find_dtype(self.weights).act_bytes < 2

    @property
    def vectors(self) -> str:
        """The format that vector kernels (norms, activations) name it by."""
        return "fp32" if self.between == "tf32" else self.between

    @property
    def between_bytes(self) -> float:
        return find_dtype(self.between).act_bytes

    @property
    def cache_bytes(self) -> float:
        return find_dtype(self.cache or self.between).act_bytes

    @property
    def expert_weights(self) -> str:
        return self.experts or self.weights

    @property
    def mlp_weights(self) -> str:
        return self.mlp or self.weights

    def runs(self, name: str, gpu: Gpu) -> str:
        """What matrices of this format run as: weights alone narrow, where they are stored so and the GPU multiplies no
        such numbers."""
        return WEIGHT_ONLY.get(name, name) if self.stored and not supports_dtype(gpu, name) else name

    def weight_only(self, gpu: Gpu) -> tuple[str, ...]:
        """Formats that run so."""
        every = dict.fromkeys((self.weights, self.mlp_weights, self.expert_weights))
        return tuple(name for name in every if self.runs(name, gpu) != name)

    @property
    def label(self) -> str:
        parts = [self.weights]
        parts += [f"mlp {self.mlp}"] if self.mlp and self.mlp != self.weights else []
        parts += [f"experts {self.experts}"] if self.experts and self.experts != self.weights else []
        parts += [f"KV cache {self.cache}"] if self.cache and self.cache != self.between else []
        return ", ".join(parts)
