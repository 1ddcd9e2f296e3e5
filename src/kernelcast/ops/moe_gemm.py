"""moe_gemm: one grouped GEMM of a mixture-of-experts layer in Triton, with its config: blocks, warps, stages.

What a config changes:

- *row blocks*: each expert's rows are padded to block_m; routing is random, so small batches leave experts out.
- *the instruction*: wgmma and tcgen05 take 64 rows or more; below that the compiler falls back to mma.sync, and
  operands pass through registers.
- *CTAs per SM*: by shared memory (one buffer per stage; mma.sync needs one less) and by registers.
- *bytes in flight*: loads issued by the stages of all CTAs of an SM; DRAM's latency wants about 30 KiB per SM.
- *L2*: group_m row blocks share the columns, so an expert's weights are read once per group, not once per block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import WIDE
from kernelcast.ops.base import Calls, flag, size
from kernelcast.ops.grouped import (
    TRITON_CONFIG,
    GroupedKernel,
    TritonBlocks,
    active_experts,
    grouped_gemm,
    random_blocks,
)
from kernelcast.ops.work import Array, Works, axis, ceil_div

# (block_m, block_n, block_k, warps, stages) where no config is given: engines' default rules draw from these.
BLOCKS = (
    (16, 32, 64, 4, 3), (16, 64, 128, 4, 4), (16, 128, 64, 4, 3), (32, 64, 128, 4, 3), (32, 128, 64, 4, 3),
    (64, 64, 32, 4, 3), (64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 4),
)  # fmt: skip
WIDE_ROWS = 64  # rows of tokens that the wide matrix instructions take at least
# Registers a thread of the plain kernel, as Triton 3.6 compiles it: least squares over 315 compiled configs (8% off).
_REGISTERS, _REGISTERS_PER_ADDRESS, _ADDRESS_BYTES = 26.6, 3.2, 16.0
# With GDDR6, configs that read 128 bytes of a row at a time are about a tenth slower than the best, which read 512
# (PipeWeave's default against tuned on A40, L20 and L40); with HBM and GDDR7 the length does not matter.
_GDDR6 = ("7.5", "8.6", "8.9")
_LONG_RUN_BYTES, _LOST_A_HALVING = 512.0, 0.05
_DRAM_LATENCY_S = 800e-9
_STEP_CYCLES = 900.0  # one trip to L2 and back, with barriers: shared by the stages in flight
_TASK_CYCLES = 2500.0  # sorted rows, first operands, write-back


class MoeGemm(GroupedKernel):
    """One grouped GEMM of a mixture-of-experts layer (Triton fused MoE): each token's row by topk experts."""

    op = "moe_gemm"
    examples = (
        {"tokens": 1024, "experts": 128, "topk": 8, "k": 2048, "n": 1536},
        {"tokens": 64, "experts": 128, "topk": 8, "k": 2048, "n": 1536, "block_m": 16, "block_n": 64, "block_k": 128,
         "group_m": 1, "warps": 4, "stages": 3},
    )  # fmt: skip

    tokens: int = size("tokens that enter the layer")
    experts: int = size("experts on this GPU", high=65536)
    topk: int = size("experts per token, routed at random", high=65536)
    k: int = size("inner dimension (hidden size, for the first GEMM)")
    n: int = size("output features of an expert (gate and up together)")
    second: bool = flag("second GEMM of a layer: one row per (token, expert) pair", default=False)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        rows = calls["tokens"] * calls["topk"] / calls["experts"] + 1e-3
        return super().shape_features(calls, gpu) | {"log_rows": np.log2(rows)} | _config_features(calls, gpu)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        config, n, pairs = _Config.of(calls, gpu), calls["n"], calls["tokens"] * calls["topk"]
        active, blocks = _experts_and_blocks(calls, config)
        rows = np.where(calls["second"] > 0, pairs, calls["tokens"])
        whole = np.ceil(blocks - 1e-6)
        work = grouped_gemm(gpu, config, n, calls["k"], blocks=whole, active=active, rows=rows, pairs=pairs)
        weights = np.asarray(work.streamed_bytes)
        work = replace(
            work,
            refetched_bytes=_read_again(config, gpu, blocks, active, ceil_div(n, config.block_n), weights)
            + weights * _short_runs(config, gpu),
            registers_per_thread=np.minimum(255.0, config.registers),
            smem_bytes_per_cta=np.minimum(config.smem_bytes, gpu.smem_bytes_per_cta),
            step_cycles=_STEP_CYCLES / np.maximum(1.0, config.stages - 1),
            task_cycles=_TASK_CYCLES,
            tile={**work.tile, "row_blocks": blocks}
            | {name: getattr(config, name) for name in ("warps", "stages", "group_m")},
        )
        return (work,)


@dataclass(frozen=True, kw_only=True)
class _Config(TritonBlocks):
    """What follows from a Triton config on a GPU."""

    group_m: Array
    wide: Array

    @classmethod
    def of(cls, calls: Calls, gpu: Gpu) -> _Config:
        columns = [axis([b[i] for b in BLOCKS]) for i in range(5)]
        given = ~np.isnan(calls["block_m"])  # nothing to choose from, in whatever company a call stands
        m, n, k, warps, stages = (c[-2:-1] if given.all() else np.where(given, c[-2], c) for c in columns)
        block_m = calls.given("block_m", m)
        has_wide = gpu.instruction_path in WIDE
        return cls(
            dtype=calls.dtype,
            block_m=block_m,
            block_n=calls.given("block_n", n),
            block_k=calls.given("block_k", k * (2.0 if calls.dtype.act_bytes <= 1.1 else 1.0)),
            warps=calls.given("warps", warps),
            stages=calls.given("stages", stages),
            group_m=calls.given("group_m", 8.0),
            wide=np.where(block_m >= WIDE_ROWS, float(has_wide), 0.0),
        )

    @property
    def buffers(self) -> Array:
        """Stages in shared memory: mma.sync holds the current one in registers."""
        return np.maximum(1.0, self.stages - (1 - self.wide))

    @property
    def registers(self) -> Array:
        """Registers per thread before the limit of 255: accumulators, and addresses of its 16-byte loads."""
        addresses = self.stage_bytes / (_ADDRESS_BYTES * self.threads)
        return _REGISTERS + self.block_m * self.block_n / self.threads + _REGISTERS_PER_ADDRESS * addresses

    @property
    def smem_bytes(self) -> Array:
        return self.buffers * self.stage_bytes


def _experts_and_blocks(calls: Calls, config: _Config) -> tuple[Array, Array]:
    """Active experts, and row blocks over all of them, on average."""
    routed = calls["tokens"], calls["experts"], calls["topk"]
    return active_experts(*routed), random_blocks(*routed, config.block_m)


def _read_again(config: _Config, gpu: Gpu, blocks: Array, active: Array, columns: Array, weights: Array) -> Array:
    """Weight bytes read from DRAM more than once: by each group of an expert's row blocks, unless one wave of CTAs
    spans several groups or L2 still holds them."""
    per_expert = blocks / np.maximum(active, 1.0)
    in_wave = gpu.sm_count / columns  # row blocks that run at the same time anyway
    together = np.maximum(np.minimum(config.group_m, per_expert), np.maximum(in_wave, 1.0))
    reads = np.maximum(1.0, per_expert / together)
    lost = np.clip(weights / np.maximum(active, 1.0) / gpu.l2_bytes * 2 - 1, 0, 1)
    return lost * (reads - 1) * weights


def _short_runs(config: _Config, gpu: Gpu) -> Array:
    """What GDDR6 loses on tiles that read short pieces of each row of weights, as a share of the bytes."""
    if gpu.compute_capability not in _GDDR6:
        return np.zeros(1)
    return _LOST_A_HALVING * np.maximum(0.0, np.log2(_LONG_RUN_BYTES / (config.block_k * config.dtype.weight_bytes)))


def _config_features(calls: Calls, gpu: Gpu) -> dict[str, Array]:
    """Effects of the config on instruction, registers, occupancy and loads in flight; 0 where none is given."""
    given = ~np.isnan(calls["block_m"])
    full = dict(calls.numbers) | {name: np.where(given, calls[name], 64.0) for name in TRITON_CONFIG}
    config = _Config.of(Calls(calls.count, full, calls.choices), gpu)
    active, blocks = _experts_and_blocks(calls, config)
    columns = _sm_features(calls, gpu, config, blocks) | _reuse_features(calls, gpu, config, active, blocks)
    features = {f"config_{name}": np.where(given, value, 0.0) for name, value in columns.items()}
    return features | {"config_given": given.astype(np.float64)}


def _sm_features(calls: Calls, gpu: Gpu, c: _Config, blocks: Array) -> dict[str, Array]:
    """How the CTAs of this config fill an SM, and the bytes they have in flight."""
    per_warp = np.ceil(np.minimum(c.registers, 255.0) * 32 / 256) * 256
    by_registers = np.floor(gpu.registers_per_sm / (per_warp * c.warps))
    by_smem = np.floor(gpu.smem_bytes_per_sm / (c.smem_bytes + 1024))
    ctas = np.maximum(1.0, np.minimum(np.minimum(by_registers, by_smem), gpu.max_threads_per_sm / c.threads))
    tasks = np.ceil(blocks) * ceil_div(calls["n"], c.block_n)
    resident = np.minimum(ctas, tasks / gpu.sm_count)
    waves = tasks / (gpu.sm_count * ctas)
    wanted = gpu.dram_bytes_per_s / gpu.sm_count * _DRAM_LATENCY_S
    ahead = np.maximum(1.0, c.stages - 1) * c.stage_bytes
    return {
        "wide": c.wide,
        "sums": np.log2(c.block_m * c.block_n / c.threads),
        "over_registers": np.log2(c.registers / 255.0),
        "spilled": np.maximum(0.0, c.registers - 255.0) / 255.0,
        "smem_used": c.smem_bytes / gpu.smem_bytes_per_cta,
        "by_registers": np.minimum(by_registers, 16.0),
        "by_smem": np.minimum(by_smem, 16.0),
        "in_flight": np.log2(resident * ahead / wanted),
        "step_bytes": np.log2(ahead),
        "resident": np.log2(np.maximum(resident, 1e-3)),
        "rounds": np.log2(np.ceil(waves)),
        "last_round": waves / np.ceil(waves),
    }


def _reuse_features(calls: Calls, gpu: Gpu, c: _Config, active: Array, blocks: Array) -> dict[str, Array]:
    """How full the tiles are, and which CTAs share what they read."""
    per_expert = np.maximum(1.0, blocks / active)
    return {
        "fill": np.log2(calls["tokens"] * calls["topk"] / active / c.block_m),
        "group_over": np.log2(np.maximum(1.0, c.group_m / per_expert)),
        "group_of": np.log2(np.minimum(c.group_m, per_expert)),
        "group_log": np.log2(c.group_m),
        "k_steps": np.log2(ceil_div(calls["k"], c.block_k)),
        "n_waste": np.mod(-calls["n"], c.block_n) / c.block_n,
        "k_waste": np.mod(-calls["k"], c.block_k) / c.block_k,
        "short_runs": _short_runs(c, gpu),
    }
