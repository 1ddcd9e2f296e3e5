"""Token mixers with a state in place of a KV cache: its size does not grow with the sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from kernelcast.errors import KernelcastError
from kernelcast.ops.dtypes import find_dtype

_CONV_BYTES = 2.0  # inputs of a convolution stay in the model's 16 bits, whatever the state's format


class RecurrentMixer(ABC):
    """A state of a matrix per head, and the inputs that its convolution still needs."""

    cache_values_per_token: ClassVar[int] = 0
    state_dtype: str
    conv_width: int

    @property
    @abstractmethod
    def matrix_values(self) -> int:
        """Numbers of the matrices of all heads, in ``state_dtype``."""

    @property
    @abstractmethod
    def conv_channels(self) -> int:
        """Columns that pass through a depthwise convolution."""

    @abstractmethod
    def weights(self, hidden: int) -> int: ...

    @property
    def conv_values(self) -> int:
        return self.conv_channels * (self.conv_width - 1)

    @property
    def state_values(self) -> int:
        """Numbers of a sequence's state, whatever its length."""
        return self.matrix_values + self.conv_values

    def query_flops(self, keys: Any) -> Any:
        """A token updates the state and reads it, however many came before."""
        return 4.0 * self.matrix_values + 0.0 * keys

    def cache_bytes(self, context_tokens: Any, value_bytes: float, tp: int) -> Any:
        """Heads are sharded over tp; an array of contexts gives an array."""
        state_bytes = self.matrix_values * find_dtype(self.state_dtype).act_bytes + self.conv_values * _CONV_BYTES
        return state_bytes / tp + 0.0 * context_tokens


@dataclass(frozen=True)
class LinearAttention(RecurrentMixer):
    """Gated delta net (Qwen3-Next, Qwen3.5)."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    state_dtype: str = "fp32"  # Qwen3.5's mamba_ssm_dtype and SGLang's default; vLLM's default is that of the model

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise KernelcastError(
                f"{self.value_heads} value heads do not divide over {self.key_heads} key heads; "
                "linear_num_value_heads has to be a multiple of linear_num_key_heads"
            )

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """q, k and v pass through one depthwise convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def in_width(self) -> int:
        """Columns of the input projections: q, k, v, the output gate z, and beta and alpha of each value head."""
        return self.conv_channels + self.value_width + 2 * self.value_heads

    @property
    def matrix_values(self) -> int:
        """key_head_dim x value_head_dim, a value head."""
        return self.value_heads * self.key_head_dim * self.value_head_dim

    def weights(self, hidden: int) -> int:
        decay = 2 * self.value_heads  # A_log and dt_bias
        conv = self.conv_channels * self.conv_width
        return hidden * self.in_width + conv + decay + self.value_head_dim + self.value_width * hidden


@dataclass(frozen=True)
class Kda(RecurrentMixer):
    """Kimi delta attention (arXiv 2510.26692): a gated delta net whose decay differs by channel."""

    heads: int
    head_dim: int
    conv_width: int
    gate_rank: int | None  # of the output gate: down to it and up again; None: one full projection (Kimi-K3)
    state_dtype: str = "fp32"

    @property
    def width(self) -> int:
        """Width of each of q, k and v."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """q, k and v, a depthwise convolution each."""
        return 3 * self.width

    @property
    def decay_rank(self) -> int:
        """The decay of each channel comes from a projection down to one head and up again (f_a, f_b)."""
        return self.head_dim

    @property
    def in_width(self) -> int:
        """Columns of what is projected from the hidden state: q, k, v, beta, the decay's and the gate's first step."""
        return self.conv_channels + self.heads + self.decay_rank + (self.gate_rank or self.width)

    @property
    def matrix_values(self) -> int:
        """head_dim x head_dim, a head."""
        return self.heads * self.head_dim**2

    def weights(self, hidden: int) -> int:
        up = self.width * (self.decay_rank + (self.gate_rank or 0))
        decay = self.heads + self.width  # A_log; dt_bias of each channel
        conv = self.conv_channels * self.conv_width
        return hidden * self.in_width + up + conv + decay + self.head_dim + self.width * hidden


@dataclass(frozen=True)
class Mamba2(RecurrentMixer):
    """Mamba-2 (arXiv 2405.21060): a scalar decay a head, keys and queries (B and C) shared by groups of heads."""

    heads: int
    head_dim: int
    groups: int
    state: int  # numbers of B and C, the keys and queries
    conv_width: int
    chunk: int  # tokens of a chunk of a prefill
    conv_bias: bool = True
    proj_bias: bool = False  # of in_proj and out_proj
    gated_norm: bool = True  # a norm of the output with its gate (most Falcon-H1 have the gate alone)
    state_dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise KernelcastError(f"{self.heads} Mamba heads do not divide over {self.groups} groups")

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """x, B and C pass through one depthwise convolution."""
        return self.width + 2 * self.groups * self.state

    @property
    def in_width(self) -> int:
        """Columns of in_proj: the gate z; x, B and C; the step dt of each head."""
        return self.width + self.conv_channels + self.heads

    @property
    def matrix_values(self) -> int:
        """head_dim x state, a head."""
        return self.width * self.state

    def weights(self, hidden: int) -> int:
        biases = (self.in_width + hidden if self.proj_bias else 0) + (self.conv_channels if self.conv_bias else 0)
        conv = self.conv_channels * self.conv_width
        small = 3 * self.heads + (self.width if self.gated_norm else 0)  # A_log, D, dt_bias; the norm
        return hidden * self.in_width + conv + small + biases + self.width * hidden
