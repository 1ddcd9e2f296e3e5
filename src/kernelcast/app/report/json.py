"""Results as strict JSON: plain values, null where a number has no value."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kernelcast.energy.power import Energy
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.evidence import MeasuredConfiguration
from kernelcast.forecast.predict import Prediction
from kernelcast.hardware import Gpu
from kernelcast.ops import Kernel, kernel_class, parameters_of
from kernelcast.results import Interval


def to_json(value: Any) -> str:
    """``value`` as strict, indented JSON."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def attributes(of: Any, *names: str) -> dict[str, Any]:
    """Fields that go by the names of attributes."""
    return {name: getattr(of, name) for name in names}


def plain(value: Any) -> Any:
    """Mappings, sequences and NumPy scalars as JSON's own types; NaN and infinity as None."""
    if value is None or type(value) in (str, int, bool):  # most of what there is
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def prediction_fields(found: Prediction, chip: Gpu, conditions: Conditions) -> dict[str, Any]:
    """A prediction, and what it was asked under."""
    return {
        **found.to_dict(),
        "gpu_id": chip.id,
        "gpu_unit_of": chip.unit_of,
        "gpu_changes": dict(chip.changes),
        "cache": cache_word(conditions),
        "without": list(conditions.without),
        "calibration": calibration_fields(conditions.calibration, found.op),
    }


def energy_fields(drawn: Energy | None) -> dict[str, Any]:
    """Joules and watts of a call or of a run on one GPU; null where nobody knows what the GPU draws."""
    return {
        **span_fields("energy_j", drawn.joules if drawn else None),
        **span_fields("power_w", drawn.watts if drawn else None),
        "sustained_s": drawn.joules.value / drawn.power_w if drawn else None,
        "clock_share": drawn.clock if drawn else None,
        "energy_support": drawn.support if drawn else None,
    }


def span_fields(name: str, span: Interval | None) -> dict[str, float | None]:
    """A value and its interval: NAME, NAME_low, NAME_high."""
    values = (span.value, span.low, span.high) if span else (None, None, None)
    told = zip((name, f"{name}_low", f"{name}_high"), values, strict=True)
    return {key: None if value is None else float(value) for key, value in told}


def run_energy_fields(energy: Interval | None, parts: Iterable[Energy | None], seconds: float, gpus: int,
                      tokens: float) -> dict[str, Any]:  # fmt: skip
    """Joules of a whole run on all its GPUs, the mean watts of one, and joules a million tokens."""
    known = [part for part in parts if part is not None]
    watts = energy.value / (seconds * gpus) if energy else None
    each = energy.value / tokens * 1e6 if energy and tokens else None
    return {
        **span_fields("energy_j", energy), "power_w": None if watts is None else float(watts),
        "joules_per_million_tokens": None if each is None else float(each),
        "energy_support": known[0].support if known else None,
    }  # fmt: skip


def evidence_fields(entries: Sequence[MeasuredConfiguration], by: str) -> dict[str, Any]:
    """Measured kinds, one by one or summed by op, GPU or stack."""
    lines = [entry.to_dict() for entry in entries] if by == "kind" else summed_evidence(entries, by)
    return {"kinds": len(entries), "calls": sum(entry.calls for entry in entries), "by": by, "evidence": lines}


def summed_evidence(entries: Sequence[MeasuredConfiguration], by: str) -> list[dict[str, Any]]:
    """A line for each op, GPU or stack: kinds and calls, mean and worst error of the kinds on calls left out."""
    groups: dict[str, list[MeasuredConfiguration]] = {}
    for entry in entries:
        groups.setdefault(str(entry.configuration["stack"]) if by == "stack" else getattr(entry, by), []).append(entry)
    lines = []
    for name, members in sorted(groups.items()):
        tested = [(entry.error, entry.inside or 0.0, entry.tested) for entry in members if entry.error is not None]
        rows = sum(count for *_, count in tested)
        lines.append(
            {
                by: name,
                "kinds": len(members),
                "calls": sum(entry.calls for entry in members),
                "error": sum(error * count for error, _, count in tested) / rows if rows else None,
                "worst_error": max((error for error, *_ in tested), default=None),
                "inside": sum(inside * count for _, inside, count in tested) / rows if rows else None,
                "ops": sorted({entry.op for entry in members}),
                "gpus": sorted({entry.gpu for entry in members}),
                "stacks": sorted({str(entry.configuration["stack"]) for entry in members}),
            }
        )
    return lines


def calibration_fields(calibration: Any, op: str) -> dict[str, Any] | None:
    """What a calibration rests on, for the family of this op; None without one."""
    if calibration is None:
        return None
    name = kernel_class(op).family
    family = calibration.families.get(name)
    told = attributes(family, "rows", "error_before", "error_after") if family else {"rows": 0}
    scales = {key: scale.factor for key, scale in calibration.scales.items() if key.startswith(f"{name} ")}
    return {"gpu": calibration.gpu, "predictor": calibration.predictor, **told, "scales": scales}


def cache_word(conditions: Conditions) -> str:
    if not math.isinf(conditions.rotation):
        return "warm"
    return "cold" if math.isinf(conditions.input_rotation) else "model"


def gpu_fields(chip: Gpu) -> dict[str, Any]:
    """Every field of a GPU, what follows from them, and the sources."""
    fields = {spec.name: getattr(chip, spec.name) for spec in dataclasses.fields(chip)}
    sources, changes, _ = (fields.pop(name) for name in ("sources", "changes", "origin"))
    return {**fields, "derived": derived_peaks(chip), "changes": changes, "sources": sources}


def derived_peaks(chip: Gpu) -> dict[str, Any]:
    """Peaks of the whole chip, per second."""
    return {
        "tensor_flops_per_s": {d: chip.tensor_flops_per_s(d) for d in chip.tensor_flops_per_clk_sm},
        "fma_flops_per_s": {d: chip.fma_flops_per_s(d) for d in chip.fma_flops_per_clk_sm},
        "xu_ops_per_s": chip.xu_ops_per_s,
        "issue_warps_per_s": chip.issue_warps_per_s,
        "smem_bytes_per_s": chip.smem_bytes_per_s,
        "l2_bytes_per_s": chip.l2_bytes_per_s,
    }


def gpu_summary(chip: Gpu) -> dict[str, Any]:
    """One line of the catalogue."""
    return {
        **attributes(chip, "id", "name", "vendor", "architecture", "sm_count", "dram_bytes", "dram_bytes_per_s"),
        "tensor_flops_per_s": derived_peaks(chip)["tensor_flops_per_s"],
        **attributes(chip, "link_kind", "link_bytes_per_s", "power_w", "aliases"),
    }


def op_fields(kernel: type[Kernel]) -> dict[str, Any]:
    """An op as the registry describes it."""
    return {
        "op": kernel.op,
        "help": first_paragraph(kernel),
        "parameters": [
            {
                "name": spec.name,
                "kind": spec.type,
                "help": spec.help,
                "required": spec.required,
                **({} if spec.required else {"default": spec.default}),
                **({"low": spec.low, "high": spec.high} if spec.type in ("size", "real", "lengths") else {}),
                **({"options": spec.options} if spec.type == "choice" else {}),
            }
            for spec in parameters_of(kernel).values()
        ],
        "examples": [dict(example) for example in kernel.examples],
    }


def first_paragraph(kernel: type[Kernel]) -> str:
    """What an op is, in one line."""
    return " ".join(doc_text(kernel).split("\n\n")[0].split())


def doc_text(kernel: type[Kernel]) -> str:
    """An op's docstring as plain text. A dataclass without one has its signature there, which is no help."""
    text = inspect.cleandoc(kernel.__doc__ or "").replace("``", "")
    return kernel.op if not text or text.startswith(f"{kernel.__name__}(") else text
