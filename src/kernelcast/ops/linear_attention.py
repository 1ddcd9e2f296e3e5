"""Linear attention: sequences with a state, prefilled in chunks or processed token by token.

gated_delta, kda and causal_conv1d are learned together. Each has a chunked kernel for prefill and a recurrent one, for
decode and for verifying draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Configuration, ConfigurationColumns, choice
from kernelcast.ops.dtypes import find_dtype
from kernelcast.ops.gemm import TASK_CYCLES
from kernelcast.ops.kernel_selection import kernel_choice
from kernelcast.ops.requests import RequestBatch, SequenceKernel
from kernelcast.ops.vector import ACCUMULATOR_BYTES, vector_kernel
from kernelcast.ops.work import Array, Number, Work, ceil_div

KERNELS = ("auto", "chunked", "recurrent")
STATE_FLOPS = 7.0  # an element of the state and token: decay; k^T S; add k v^T; q^T S
_DECODE_BLOCK = 32.0  # columns of the state that one warp keeps in decode (fused_recurrent.py)
# Of a token: its loads, two sums over the keys that wait for each other, the write. A round number read off the checks
# of two to eight drafts in AIConfigurator's rows: 1.0 us more for each on H200, B200 and L40S alike.
_TOKEN_CYCLES = 1800.0


class LinearKernel(SequenceKernel):
    """A family over sequences with a state, with chunked and recurrent kernels."""

    family = "linear_attention"
    batch_parameter = "batch"
    trailing_parameters = ("kernel",)
    decodes_by: ClassVar[str | None] = "triton"  # the backend of recurrent kernels; None: the call's

    kernel: str = choice("auto: recurrent where q_len is 1", KERNELS, default="auto")

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        """A batch with a prompt in it is a prefill."""
        requests = RequestBatch.of(calls)
        stepped = requests.least(recurrent_mask(calls, requests)) == 1
        configuration: dict[str, str | NDArray[Any] | None] = {
            **calls.choices,
            "kernel": np.where(stepped, "recurrent", "chunked").astype(object),
            "lengths": "equal" if requests.starts is None else _lengths(requests),
        }
        if "backend" in configuration and cls.decodes_by:
            configuration["backend"] = np.where(stepped, cls.decodes_by, calls.choice("backend"))
        return configuration

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        if "backend" not in configuration or configuration["backend"] or configuration.get("stack") is None:
            return dict(configuration)
        choice = kernel_choice(configuration["stack"], gpu, cls.op, str(configuration["dtype"]))
        return {**configuration, "backend": choice.backend if choice else None}

    @classmethod
    def sizes(cls, calls: Calls) -> Mapping[str, Array]:
        """Means for a ragged batch. Flags are left out: physics accounts for them."""
        requests = RequestBatch.of(calls)
        numbers = {p.name: calls[p.name] for p in cls.parameters.values() if p.type == "size"}
        lengths = {"batch": requests.count, "q_len": requests.total(requests.queries) / requests.count}
        return {**numbers, **lengths}

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        requests = RequestBatch.of(calls)
        flags = {p.name: calls[p.name] for p in cls.parameters.values() if p.type == "flag"}
        stepped = requests.total(recurrent_mask(calls, requests)) / requests.count
        return {**super().shape_features(calls, gpu), "one_by_one": stepped, **flags}

    @classmethod
    def backend_of(cls, calls: Calls, gpu: Gpu) -> str:
        """The call's backend, else the stack's, else Triton, which runs everywhere."""
        choice = kernel_choice(calls.choice("stack"), gpu, cls.op, calls.choice("dtype"))
        return str(calls.choice("backend") or (choice and choice.backend) or "triton")


def recurrent_mask(calls: Calls, requests: RequestBatch) -> Array:
    """1 for each sequence that is processed token by token."""
    how = calls.choice("kernel")
    if how == "auto":
        return (requests.queries == 1) * 1.0
    return np.full(requests.queries.shape, float(how == "recurrent"))


def _lengths(requests: RequestBatch) -> NDArray[Any]:
    same = requests.most(requests.queries) == requests.least(requests.queries)
    return np.where(same, "equal", "ragged").astype(object)


class StateSizes:
    """The chunked and the recurrent sequences of each call, their heads and bytes; all arrays (calls,).

    A value head has a state of key_dim x value_dim; value heads share key heads.
    """

    def __init__(
        self, calls: Calls, keys: Array, values: Array, k: Array, v: Array, chunk: Array, stateless: Number = 0.0
    ) -> None:
        requests = RequestBatch.of(calls)
        queries, alone = requests.queries, recurrent_mask(calls, requests)
        chunks = (1 - alone) * ceil_div(queries, requests.each(chunk))
        self.keys, self.values, self.k, self.v, self.chunk = keys, values, k, v, chunk  # heads, and their dimensions
        self.state = k * v  # elements of one head's state
        self.element_bytes, self.math = calls.dtype.act_bytes, calls.dtype.math
        self.state_bytes = find_dtype(calls.choice("state_dtype")).act_bytes  # of one element
        # recurrent sequences: their number, tokens of all, tokens of the longest
        self.recurrent, self.steps = requests.total(alone), requests.total(queries * alone)
        self.longest_steps = requests.most(queries * alone)
        # chunked sequences: their number, tokens and chunks of all, chunks of the longest
        self.sequences, self.tokens = requests.total(1 - alone), requests.total(queries * (1 - alone))
        self.chunks, self.longest = requests.total(chunks), requests.most(chunks)
        self.qk_bytes = self.tokens * keys * k * self.element_bytes  # queries, or keys
        self.wide_bytes = self.tokens * values * k * self.element_bytes  # key_dim values per value head, as in w
        self.value_bytes = self.tokens * values * v * self.element_bytes
        self.gate_bytes = self.tokens * values * ACCUMULATOR_BYTES  # fp32: beta, or the summed decay
        self.square_bytes = self.tokens * values * chunk * ACCUMULATOR_BYTES  # fp32: chunk x chunk per chunk
        self.chunk_state_bytes = self.chunks * values * self.state * self.element_bytes  # before each chunk
        kept = self.sequences * (1 - np.asarray(stateless))  # with a state that is read first and written at the end
        self.kept_state_bytes = 2 * kept * values * self.state * self.state_bytes


def recurrent_kernel(
    gpu: Gpu,
    sizes: StateSizes,
    gates: Number = 1.0,
    beside_bytes: Number = 0.0,
    beside_flops: Number = 0.0,
    state_flops: float = STATE_FLOPS,
) -> Work:
    """Token by token with the state in registers (fused_recurrent.py): decode, and verification of draft tokens.

    The state is read once and written after every token, since verification may stop at any of them. ``gates``: decays
    per value head and token. ``beside``: bytes and FLOPs of operations fused into the kernel.
    """
    block = np.minimum(_DECODE_BLOCK, sizes.v)
    blocks = ceil_div(sizes.v, block)
    states = (sizes.recurrent + sizes.steps) * sizes.values * sizes.state
    head_tokens = sizes.steps * sizes.values
    work = vector_kernel(
        gpu,
        tasks=sizes.recurrent * sizes.values * blocks,
        threads=float(gpu.warp_threads),
        moved_bytes=sizes.steps * (2 * sizes.keys * sizes.k + 2 * sizes.values * sizes.v) * sizes.element_bytes
        + head_tokens * (gates - 1) * sizes.element_bytes,
        again_bytes=head_tokens * blocks * 2 * sizes.k * sizes.element_bytes,  # q, k for each block
        streamed_bytes=states * sizes.state_bytes + beside_bytes,
        flops=state_flops * head_tokens * sizes.state + beside_flops,
        xu_ops=head_tokens * (4 + gates),  # two norms, two gates; the decay
        converted=states if sizes.state_bytes < ACCUMULATOR_BYTES else 0.0,
        registers=np.minimum(255.0, 64.0 + sizes.k * block / gpu.warp_threads),
        steps=np.maximum(1.0, sizes.longest_steps),
        runs=sizes.recurrent > 0,
    )
    longest = np.maximum(1.0, sizes.longest_steps * sizes.recurrent / np.maximum(sizes.steps, 1.0))
    return replace(work, longest=longest, step_cycles=_TOKEN_CYCLES, task_cycles=TASK_CYCLES)
