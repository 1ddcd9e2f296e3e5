"""Number formats of a served model: its matrices, the numbers between them, and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from kernelcast.errors import KernelcastError, unknown
from kernelcast.kernels.dtypes import dtype
from kernelcast.networks.architecture import Architecture

WEIGHTS = ("bf16", "fp16", "fp32", "tf32", "fp8", "fp8_block", "int8", "int4", "nvfp4")
CACHE = ("bf16", "fp16", "fp8")
_WHOLE = ("bf16", "fp16", "fp32", "tf32")


@dataclass(frozen=True)
class Precision:
    """``weights``: format of the matrices of layers (the head, the router and the embedding stay in ``between``).
    ``experts``: of the experts, where it differs. ``cache``: of keys and values, default as ``between``."""

    weights: str = "bf16"
    cache: str | None = None
    experts: str | None = None

    def __post_init__(self) -> None:
        for name in (self.weights, self.experts or self.weights):
            if name not in WEIGHTS:
                raise unknown("number format of weights", name, WEIGHTS)
        if self.cache is not None and self.cache not in CACHE:
            raise unknown("number format of the KV cache", self.cache, CACHE)
        if self.cache == "fp8" and self.between in ("fp32", "tf32"):
            raise KernelcastError("an fp8 KV cache needs 16-bit activations")

    @classmethod
    def of(cls, model: Architecture, weights: str | None = None, cache: str | None = None) -> Precision:
        """As asked, else as the checkpoint stores its matrices."""
        if weights is not None or model.quantization is None:
            return cls(weights or "bf16", cache)
        stored = model.quantization
        if stored.weights is None:
            raise KernelcastError(f"{model.name} ships as {stored.unknown}, which has no kernels here; give --dtype")
        return cls(stored.weights, cache or stored.cache, experts=stored.experts)

    @property
    def between(self) -> str:
        """Activations between layers."""
        return self.weights if self.weights in _WHOLE else "bf16"

    @property
    def quantised(self) -> bool:
        """Whether activations change format before a product."""
        return dtype(self.weights).act_bytes < 2

    @property
    def vectors(self) -> str:
        """The format that vector kernels (norms, activations) name it by."""
        return "fp32" if self.between == "tf32" else self.between

    @property
    def between_bytes(self) -> float:
        return dtype(self.between).act_bytes

    @property
    def cache_bytes(self) -> float:
        return dtype(self.cache or self.between).act_bytes

    @property
    def expert_weights(self) -> str:
        return self.experts or self.weights

    @property
    def label(self) -> str:
        parts = [self.weights]
        parts += [f"experts {self.experts}"] if self.experts and self.experts != self.weights else []
        parts += [f"KV cache {self.cache}"] if self.cache and self.cache != self.between else []
        return ", ".join(parts)
