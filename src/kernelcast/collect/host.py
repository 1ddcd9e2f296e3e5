"""Measure the host of this machine: what its Python and driver take for a kernel, a view, a call, an autograd op.

Small models run with the GPU nearly idle, so that a step takes as long as the host does. The same models are traced,
and the costs of a ``Host`` are those that explain all steps best. Needs torch and CUDA.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kernelcast.files import complete
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu
from kernelcast.ops.work import Array
from kernelcast.schedule import host
from kernelcast.schedule.timeline import COSTS, WITH_LAUNCHES, Host
from kernelcast.tracing import MODES, trace
from kernelcast.tracing.aten import OpSettings, op_launches
from kernelcast.tracing.traced import Trace
from kernelcast.training.step import host_counts, predict_ops

_WARM_UPS, _ROUNDS, _REPEATS = 3, 4, 8  # in rounds over all programs: a host's speed drifts within seconds
# Prior spread of the costs' proportions around those of the bundled host: costs that noisy programs do not
# distinguish stay in proportion. By programs left out of three measured hosts: 16% off with 0.1 to 0.2, 17% with 0.5.
_SPREAD = 0.15
_KERNELS = 300  # of a graph, and behind one another in a stream


@dataclass(frozen=True)
class ProgramTimes:
    """A measured program: seconds of its steps, and how often it has each of the host's costs."""

    name: str
    seconds: tuple[float, ...]
    counts: Mapping[str, float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def counts_of(traced: Trace, target: Gpu) -> dict[str, float]:
    """How often a step has each of ``COSTS``; kernels as the rules of ATen ops say."""
    times = Times(target, Conditions(predictor="generic"))
    settings = OpSettings(capability=target.compute_capability, l2_bytes=target.l2_bytes)
    costs = predict_ops(traced.ops, times, lambda op: op_launches(op, settings))
    counts = {name: float(np.sum(count)) for name, count in host_counts(traced).items()}
    return counts | {"launch_s": float(sum(op_cost.launches for op_cost in costs if op_cost))}


def measured_host(target: Gpu, say: Callable[[int, int], None] = lambda done, total: None) -> Host:
    """The measured costs of this machine's host."""
    return fitted(timed_programs(target, torch.device("cuda"), say), _gaps())


def timed_programs(
    target: Gpu,
    device: torch.device,
    say: Callable[[int, int], None] = lambda done, total: None,
    rounds: int = _ROUNDS,
    repeats: int = _REPEATS,
) -> list[ProgramTimes]:
    """Each program on the device, in inference and in training."""
    with device:
        cases = [(f"{name}, {mode}", model, inputs, mode) for name, model, inputs in programs() for mode in MODES]
    taken: dict[str, tuple[float, ...]] = {name: () for name, *_ in cases}
    for done in range(rounds):
        for at, (name, model, inputs, mode) in enumerate(cases):
            say(done * len(cases) + at, rounds * len(cases))
            taken[name] += _seconds(model, inputs, mode, device, repeats)
    return [
        ProgramTimes(name, taken[name], counts_of(trace(model, inputs, mode, optimizer="adamw"), target))  # type: ignore[arg-type]
        for name, model, inputs, mode in cases
    ]


def fitted(timed: Sequence[ProgramTimes], gaps: Mapping[str, float]) -> Host:
    """The costs that explain the programs best: least squares of relative errors, with a weak pull to the proportions
    of the bundled host; and how far single steps and programs lie from them."""
    usual = host("server")
    prior = np.array([getattr(usual, name) for name in COSTS])
    counts = np.array([[program.counts[name] for name in COSTS] for program in timed]) * prior
    taken = np.array([program.median_s for program in timed])
    shares = counts / taken[:, None]
    scale = float(np.median(1 / shares.sum(axis=1)))
    noise = float(np.std(shares @ _positive(shares, scale, pull=0.05) - 1)) + 0.01  # of a step that is well explained
    factors = _positive(shares, scale, pull=noise / (_SPREAD * scale))
    off = shares @ factors  # predicted over measured
    steps = np.concatenate([np.array(program.seconds) / program.median_s for program in timed])
    low, high = (float(np.quantile(1 / off, q) * np.quantile(steps, q)) for q in (0.1, 0.9))
    error = 100 * float(np.abs(off - 1).mean())
    about = {"programs": f"{len(timed)} steps of small models, off by {error:.1f}% on average"}
    known: dict[str, Any] = {
        **{name: float(value) for name, value in zip(COSTS, factors * prior, strict=True)},
        **{name: getattr(usual, name) * scale for name in WITH_LAUNCHES},
        **gaps,
    }
    return Host(
        id="measured",
        name=f"{platform.node() or 'this machine'}, Python {platform.python_version()}, PyTorch {torch.__version__}",
        **known,
        faster=max(0.05, 1 - low),
        slower=max(0.05, high - 1),
        sources=tuple({**about, "date": datetime.now(UTC).isoformat(timespec="seconds")}.items()),
    )


def _positive(shares: Array, scale: float, pull: float) -> Array:
    """Least squares of programs that all take 1, ``pull`` the weight of each factor's distance from ``scale``; with
    factors of at least a twentieth of it: those that would fall below stay there."""
    programs, count = shares.shape
    table = np.vstack([shares, pull * np.eye(count)])
    goal = np.concatenate([np.ones(programs), np.full(count, pull * scale)])
    least, factors = scale / 20, np.full(count, scale)
    free = np.ones(count, dtype=bool)
    for _ in range(count):
        rest = goal - table[:, ~free] @ factors[~free]
        factors[free] = np.linalg.lstsq(table[:, free], rest, rcond=None)[0]
        below = free & (factors < least)
        if not below.any():
            break
        factors[below], free = least, free & ~below
    return factors


def _seconds(model: nn.Module, inputs: Any, mode: str, device: torch.device, repeats: int) -> tuple[float, ...]:
    """Whole steps, the GPU idle before each."""
    model.train(mode == "training")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if mode == "training" else None

    def step() -> None:
        with torch.set_grad_enabled(optimizer is not None):
            out = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        if optimizer is not None:
            seconds = out if isinstance(out, torch.Tensor) else out[0]
            seconds.mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for _ in range(_WARM_UPS):
        step()
    seconds = []
    gc.collect()
    gc.disable()  # a collection takes longer than a step
    try:
        for _ in range(repeats):
            _wait(device)
            start = time.perf_counter()
            step()
            _wait(device)
            seconds.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return tuple(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _gaps() -> dict[str, float]:
    """Gaps between kernels of a stream that are all launched in time, and of a graph; and a graph's launch."""
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)

    def kernels() -> None:
        for _ in range(_KERNELS):
            torch.nn.functional.layer_norm(x, (1024,))

    kernels()
    kernel_s = _profiled(kernels) / _KERNELS
    torch.cuda._sleep(200_000_000)  # the host is done before the first of them starts
    stream_s = _between(kernels) / _KERNELS
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels()
    graph.replay()
    graph_s = statistics.median(_between(graph.replay) for _ in range(5)) / _KERNELS
    launching = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        launching.append(time.perf_counter() - start)
    return {
        "gap_s": max(0.0, stream_s - kernel_s),
        "graph_gap_s": max(0.0, graph_s - kernel_s),
        "graph_s": statistics.median(launching),
    }


def _between(run: Callable[[], None]) -> float:
    """Seconds on the GPU's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _profiled(run: Callable[[], None]) -> float:
    """Seconds of the kernels alone."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    averages: Any = profiler.key_averages()
    return sum(float(row.self_device_time_total) for row in averages if "layer_norm" in row.key) * 1e-6


def write_host(measured: Host, path: Path) -> None:
    """Write the file that ``--host`` takes, atomically."""
    numbers = [name for name in vars(measured) if name not in ("id", "name", "gpus", "sources")]
    lines = [
        f'name = "{measured.name}"',
        *(f"{name} = {getattr(measured, name):.3g}" for name in numbers),
        "",
        "[sources]",
    ]
    lines += [f'{name} = "{text}"' for name, text in measured.sources]
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path) as part:
        part.write_text("\n".join(lines) + "\n")


# ---- small models whose steps the host bounds, with the ops of real models in different proportions


_WIDTH, _HEADS, _LENGTH = 64, 4, 32


class Encoder(nn.Module):
    """A transformer block; ``by_hand``: attention as two products, with the views that takes."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.by_hand = by_hand

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], _HEADS, -1).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.by_hand:
            return functional.scaled_dot_product_attention(q, k, v)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return functional.softmax(scores, dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        attended = self.attend(self.heads(self.query(y)), self.heads(self.key(y)), self.heads(self.value(y)))
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gated(nn.Module):
    """A block of a language model as libraries write it: norms, rotation and gates by element-wise ops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))
        self.gate, self.up, self.down = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3))

    def normed(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x[..., : _WIDTH // 2], x[..., _WIDTH // 2 :]
        return x * 0.5 + torch.cat((-b, a), dim=-1) * 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.rotated(self.normed(x))
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Residual(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(16, 16, 1, bias=False), nn.Conv2d(16, 16, 1, bias=False)
        self.middle = nn.Conv2d(16, 16, 3, padding=1, groups=groups, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norms[0](self.narrow(x)))
        y = self.relu(self.norms[1](self.middle(y)))
        return self.relu(x + self.norms[2](self.wide(y)))


class Looped(nn.Module):
    """A recurrence written as a loop: tiny ops and views, hardly any Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(_WIDTH, 2 * _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        decay, inputs = self.project(x).chunk(2, dim=-1)
        decay, state, out = torch.sigmoid(decay), torch.zeros_like(x[:, 0]), []
        for at in range(x.shape[1]):
            state = decay[:, at] * state + inputs[:, at]
            out.append(state[:, None])
        return torch.cat(out, dim=1)


def programs() -> Iterator[tuple[str, nn.Module, Any]]:
    """Name, model and inputs, on the default device; in bf16."""
    tokens = torch.randn(1, _LENGTH, _WIDTH, dtype=torch.bfloat16)
    pixels = torch.randn(1, 16, 8, 8, dtype=torch.bfloat16)
    models: dict[str, tuple[list[nn.Module], Tensor]] = {
        "encoder": ([Encoder(False) for _ in range(16)], tokens),
        "encoder by hand": ([Encoder(True) for _ in range(16)], tokens),
        "gated": ([Gated() for _ in range(24)], tokens),
        "residual": ([Residual() for _ in range(16)], pixels),
        "depthwise": ([Residual(16) for _ in range(16)], pixels),
        "perceptron": ([part for _ in range(40) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())], tokens),
        "loop": ([Looped() for _ in range(8)], tokens),
    }
    for name, (parts, inputs) in models.items():
        yield name, nn.Sequential(*parts).to(torch.bfloat16), inputs
    yield from _of_transformers()


def _of_transformers() -> Iterator[tuple[str, nn.Module, Any]]:
    """Models of transformers, if installed: much Python between the ops."""
    try:
        import transformers
    except ImportError:
        return
    sizes: dict[str, Any] = {
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_attention_heads": _HEADS,
        "vocab_size": 256,
    }
    ids = {"input_ids": torch.randint(4, 250, (1, _LENGTH))}
    llama = transformers.LlamaConfig(**sizes, num_hidden_layers=12, num_key_value_heads=2)
    bert = transformers.BertConfig(**sizes, num_hidden_layers=12)
    yield "llama", transformers.LlamaModel._from_config(llama, dtype=torch.bfloat16), ids | {"use_cache": False}
    yield "bert", transformers.BertModel._from_config(bert, dtype=torch.bfloat16), ids
