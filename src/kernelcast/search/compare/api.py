"""``kernelcast.compare`` and ``kernelcast.compare_training``: the commands' questions, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelcast import models
from kernelcast.hardware import Gpu
from kernelcast.hardware.prices import read_prices
from kernelcast.models.architecture import Architecture
from kernelcast.search.compare.asked import ALL, Asked, chosen_gpus
from kernelcast.search.compare.compare import Comparison, compare_asked
from kernelcast.search.plan.goals import Goal, parse_ms
from kernelcast.stacks import stack as named_stack
from kernelcast.tracing.traced import Trace

if TYPE_CHECKING:
    from kernelcast.search.compare.training import TrainingComparison

Names = str | Sequence[str]
Time = str | float | None


def compare(
    model: str | Path | Architecture,
    gpus: Names = "all",
    *,
    what_if: Sequence[str] = (),
    stack: str = "vllm",
    formats: Names | None = None,
    ttft: Time = None,
    tpot: Time = None,
    e2el: Time = None,
    prices: Path | None = None,
    price: Sequence[str] = (),
    price_kind: str = "on_demand",
    thorough: bool = False,
    **asked: Any,
) -> Comparison:
    """Every GPU at its best way to run ``model``, in order.

    ``gpus``: names, or ``all``; ``what_if``: each adds a variant of every GPU (``dram_bytes_per_s*1.5``). ``ttft``,
    ``tpot``, ``e2el``: latency limits ("500ms", or milliseconds). ``formats``: of weights, or ``all``; None: as the
    checkpoint is. ``asked``: ``batch`` or ``rate``, ``input_len``, ``output_len``, ``max_gpus``, ``by``, ``kv_dtype``,
    ``skew``, ``conditions``, as in ``Asked``.
    """
    times = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    goals = [Goal(name, "mean", parse_ms(str(text), f"--{name}")) for name, text in times.items() if text is not None]
    found = model if isinstance(model, Architecture) else models.model(model)
    if found.kind == "encoder":
        asked.setdefault("output_len", 1)  # it writes none: one pass
    words = None if formats is None else tuple(_words(formats))
    if words is not None and "all" in words:
        words = ALL
    return compare_asked(
        Asked(
            found, _gpus(gpus, what_if), named_stack(stack), goals=tuple(goals), formats=words,
            prices=read_prices(prices, price, price_kind), **asked,
        ),
        thorough=thorough,
    )  # fmt: skip


def compare_training(
    trace: Trace,
    gpus: Names = "all",
    *,
    what_if: Sequence[str] = (),
    prices: Path | None = None,
    price: Sequence[str] = (),
    price_kind: str = "on_demand",
    **asked: Any,
) -> TrainingComparison:
    """Every GPU at its best way to train with ``trace`` (of ``kernelcast.trace``, mode="training"), in order.

    ``asked``: ``layout``, ``tokens`` or ``samples`` of the whole training, ``max_gpus``, ``by``, ``conditions``,
    ``how``, as in ``AskedTraining``.
    """
    from kernelcast.search.compare.training import AskedTraining, compare_steps  # what serving does not wait for

    known = read_prices(prices, price, price_kind)
    return compare_steps(AskedTraining(trace, _gpus(gpus, what_if), prices=known, **asked))


def _gpus(names: Names, what_if: Sequence[str]) -> tuple[Gpu, ...]:
    return chosen_gpus(_words(names), what_if)


def _words(names: Names) -> list[str]:
    return [word.strip() for word in (names.split(",") if isinstance(names, str) else names) if word.strip()]
