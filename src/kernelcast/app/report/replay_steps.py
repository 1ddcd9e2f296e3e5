"""Steps of an engine beside their forecasts: as text, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from kernelcast.app.report.plot import picture
from kernelcast.app.report.simulate import head, pool_fields
from kernelcast.app.report.text import (
    binary_bytes_text,
    dense_table,
    digits,
    evidence_lines,
    percent,
    plain_table,
    show,
    time_text,
)
from kernelcast.diagnose.step_kernels import StepKernels
from kernelcast.serving.service import HOST_FACTOR, OVERHEADS, SPREAD
from kernelcast.serving.step_calibration import FITTED, CalibratedSteps
from kernelcast.serving.step_replay import LARGE_HOST, StepComparison, StepReplay

_TERMS = {
    "decode_factor": "decode, over its forecast",
    "prompt_factor": "prefill, over its forecast",
    "step_s": "host, for each step",
    "sequence_s": "host, for each sequence of a step",
    HOST_FACTOR: "host, over its usual times",
}
_MEMORY = {
    "weights": "weights",
    "activation": "activations",
    "stack": "CUDA context, graphs",
    "share": "filled at most",
}
_COLOURS = {"decode": "#2b6cb0", "mixed": "#c05621", "prompts alone": "#2f855a"}
_LEGEND = (
    "Milliseconds; a step is sequences x context + prompt. host: what the host does to launch it, measured / forecast; "
    "the GPU waits where its kernels are shorter."
)
_KNOWN = ("engine", "release", "model", "gpu", "engine_args", "quantization", "dtype", "kv_cache_dtype", "tp",
          "max_num_seqs", "max_num_batched_tokens", "max_model_len", "async_scheduling", "cudagraph_mode",
          "block_size", "kv_blocks", "gpu_memory_utilization")  # fmt: skip


# ---- JSON ----
def fields(
    replay: StepReplay, kernels: Sequence[StepKernels], before: StepReplay | None = None,
    fitted: CalibratedSteps | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Every step and the errors of each kind; with what was fitted, where something was."""
    engine, tokens = replay.table.engine, replay.table.kv_tokens
    values: dict[str, Any] = {
        "steps_file": str(replay.table.path),
        "engine": {name: engine[name] for name in _KNOWN if name in engine},
        "gpus": replay.service.gpus,
        **pool_fields(replay.service.pool),
        "assumed": list(replay.assumed),
        "errors": {name: asdict(errors) for name, errors in replay.groups.items()},
        "kv_cache": {"measured_tokens": tokens, "predicted_tokens": replay.logged_tokens,
                     "error": _kv_error(replay)},
        "memory": {name: {"measured_bytes": measured, "predicted_bytes": predicted}
                   for name, (measured, predicted) in replay.memory_bytes.items()},
        "steps": [_step_fields(step, before.steps[at] if before else None) for at, step in enumerate(replay.steps)],
        "kernels": [_kernel_fields(step) for step in kernels],
        "evidence": replay.rests_on.to_dict(),
    }  # fmt: skip
    if before:
        values["errors_before"] = {name: asdict(errors) for name, errors in before.groups.items()}
    if fitted:
        values["calibration"] = calibration_fields(fitted)
    return values


def calibration_fields(fitted: CalibratedSteps) -> dict[str, Any]:
    terms = (*OVERHEADS, SPREAD, HOST_FACTOR)
    return {
        "on": "steps", "steps": fitted.fitted_on, "fitted": list(fitted.fitted), "error_before": fitted.error_before,
        "error": fitted.error, "before": {name: fitted.value(name, fitted.before) for name in terms},
        "terms": {name: fitted.value(name, fitted.stack) for name in terms},
    }  # fmt: skip


def _step_fields(each: StepComparison, before: StepComparison | None) -> dict[str, Any]:
    step = each.step
    values = {
        "kind": step.step_type, "decodes": step.decodes, "context": step.context, "prompts": step.prompts,
        "prompt_tokens": step.prompt_tokens, "past": step.past, "repeats": step.repeats, "spread": step.spread,
        "measured_s": step.step_s, "predicted_s": each.predicted_s, "low_s": each.low_s, "high_s": each.high_s,
        "error": each.error, "inside": each.inside, "graph": each.graph, "measured_host_s": step.host_s,
        "predicted_host_s": each.host_s,
    }  # fmt: skip
    if before:
        values |= {"uncalibrated_s": before.predicted_s, "uncalibrated_error": before.error}
    return values


def _kernel_fields(each: StepKernels) -> dict[str, Any]:
    step = each.step
    return {
        "decodes": step.decodes, "context": step.context, "prompts": step.prompts, "prompt_tokens": step.prompt_tokens,
        "kernels": each.kernels, "launches": each.launches,
        "parts": {part: {"measured_s": each.measured_s.get(part, 0.0), "predicted_s": each.predicted_s.get(part, 0.0)}
                  for part in each.parts},
    }  # fmt: skip


def _kv_error(replay: StepReplay) -> float | None:
    tokens = replay.table.kv_tokens
    return replay.logged_tokens / tokens - 1 if tokens else None


# ---- text ----
def print_steps(
    replay: StepReplay, kernels: Sequence[StepKernels], before: StepReplay | None = None,
    fitted: CalibratedSteps | None = None,
) -> None:  # fmt: skip
    """What ran, every step, the errors of each kind, kernels and memory."""
    engine = replay.table.engine
    show(head(replay.service))
    mode = f", CUDA graphs {replay.table.graph_mode}" if replay.table.graph_mode else ""
    show(f"{replay.table.path.name}: {len(replay.steps):,} steps of {engine['engine']} {engine['release']}{mode}", "")
    if fitted:
        _print_fitted(fitted)
    show(_step_table(replay, before), "")
    show(_LEGEND, "")
    show(_group_table(replay, before), "")
    if kernels:
        show(_kernel_table(kernels), "")
    show(_memory_table(replay), "")
    for number, line in enumerate(replay.assumed):
        show(f"{'assumed' if not number else '':10} {line}")
    show(*evidence_lines(replay.rests_on))


def _step_table(replay: StepReplay, before: StepReplay | None) -> Table:
    earlier, rows = ("before",) if before else (), []
    for at, each in enumerate(replay.steps):
        step, was = each.step, (f"{before.steps[at].error:+.1%}",) if before else ()
        host = f"{'-' if step.host_s is None else _ms(step.host_s)} / {_ms(each.host_s)}"
        rows.append((
            step.text, step.step_type, _ms(step.step_s), *was, _ms(each.predicted_s), f"{each.error:+.1%}",
            f"{_ms(each.low_s)} to {_ms(each.high_s)}", host, "yes" if each.graph else "",
            "" if each.inside else "outside",
        ))  # fmt: skip
    columns = ("step", "", "measured", *earlier, "forecast", "error", "80% interval", "host", "graph", " ")
    return dense_table(*columns, left=("step", "", " "), rows=rows, gap=1)


def _ms(seconds: float) -> str:
    return digits(seconds * 1e3, 3)


def _group_table(replay: StepReplay, before: StepReplay | None) -> Table:
    earlier, rows = ("before",) if before else (), []
    for name, errors in replay.groups.items():
        was = (percent(before.groups[name].mean),) if before else ()
        host = f"{percent(errors.host)} ({errors.large_hosts})" if errors.host is not None else ""
        sizes = (percent(size) for size in (errors.mean, errors.median, errors.worst))
        rows.append((name, f"{errors.steps:,}", *was, *sizes, f"{errors.bias:+.1%}", f"{errors.inside:.0%}", host))
    columns = (
        "errors",
        "steps",
        *earlier,
        "mean",
        "median",
        "worst",
        "bias",
        "in interval",
        f"host over {LARGE_HOST:.0%}",
    )
    return plain_table(*columns, right=columns[1:], rows=rows)


def _kernel_table(kernels: Sequence[StepKernels]) -> Table:
    rows: list[tuple[str, ...]] = []
    for each in kernels:
        name = each.step.text
        for part in each.parts:
            rows.append((name, part, *_times(each.measured_s.get(part, 0.0), each.predicted_s.get(part, 0.0)), ""))
            name = ""
        note = f"{each.kernels:,.0f} kernels by {each.launches:,.0f} launches"
        rows.append(("", "all", *_times(sum(each.measured_s.values()), sum(each.predicted_s.values())), note))
    return dense_table("kernels of a step", "", "measured", "forecast", "error", " ",
                       left=("kernels of a step", "", " "), rows=rows)  # fmt: skip


def _times(measured_s: float, predicted_s: float) -> tuple[str, str, str]:
    error = f"{predicted_s / measured_s - 1:+.0%}" if measured_s and predicted_s else ""
    return _ms(measured_s), _ms(predicted_s), error


def _memory_table(replay: StepReplay) -> Table:
    tokens, error = replay.table.kv_tokens, _kv_error(replay)
    predicted = f"{replay.logged_tokens:,}"
    rows = [("KV cache, tokens", f"{tokens:,}" if tokens else "", predicted, "" if error is None else f"{error:+.1%}")]
    for name, (measured, size) in replay.memory_bytes.items():
        off = "" if measured is None or not measured else f"{size / measured - 1:+.1%}"
        rows.append(
            (_MEMORY[name], "" if measured is None else binary_bytes_text(measured), binary_bytes_text(size), off)
        )
    return plain_table("memory", "measured", "predicted", "error", right=("measured", "predicted", "error"), rows=rows)


def _print_fitted(fitted: CalibratedSteps) -> None:
    before, after = percent(fitted.error_before), percent(fitted.error)
    show(f"calibrated on {fitted.fitted_on:,} steps: {before} off before, {after} after, on compositions left out", "")
    rows = [(_TERMS[name], *(_value(name, fitted.value(name, stack)) for stack in (fitted.before, fitted.stack)), name)
            for name in FITTED]  # fmt: skip
    rows.append(("how far its steps may be off", "", f"{fitted.stack.spread:.1%}", SPREAD))
    show(plain_table("", "before", "fitted", "", right=("before", "fitted"), rows=rows), "")


def _value(name: str, value: float) -> str:
    if name.endswith("factor"):
        return f"x {value:.3f}"
    return time_text(value) if value >= 1e-9 else "0"


def write_plot(replay: StepReplay, path: Path) -> None:
    """Every step, measured and forecast with its interval, by its kind."""
    with picture(path, (8.0, 6.0)) as (figure, axes):
        axis = axes[0]
        for name, colour in _COLOURS.items():
            steps = [each for each in replay.steps if each.step.group == name]
            measured, likely = [each.step.step_s * 1e3 for each in steps], [each.predicted_s * 1e3 for each in steps]
            ends = [[(each.predicted_s - each.low_s) * 1e3 for each in steps],
                    [(each.high_s - each.predicted_s) * 1e3 for each in steps]]  # fmt: skip
            if steps:
                axis.errorbar(measured, likely, yerr=ends, fmt="o", ms=4, lw=0.8, color=colour, label=name)
        most = max(max(each.step.step_s, each.high_s) for each in replay.steps) * 1e3
        axis.plot([0, most], [0, most], color="#1a202c", lw=0.8)
        axis.set_xlabel("measured, ms a step")
        axis.set_ylabel("predicted, ms a step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
        axis.legend(frameon=False)
        deployment = replay.service.pool.deployment
        figure.suptitle(f"{deployment.model.name} on {deployment.gpu.name}, {replay.table.engine['engine']} "
                        f"{replay.table.engine['release']}")  # fmt: skip
