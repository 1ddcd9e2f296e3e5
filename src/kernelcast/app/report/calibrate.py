"""A calibration as text and JSON: how far off calls and runs were before and after, and what was scaled."""

from __future__ import annotations

from dataclasses import asdict
from math import exp
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kernelcast.app.report.text import plain_table, show, time_text
from kernelcast.collect.calibrate.scales import LEAST_RUNS, RunErrors

if TYPE_CHECKING:
    from kernelcast.forecast import Calibration
    from kernelcast.forecast.calibration import FamilyCalibration

_SHOWN = 0.01  # of the runs' time, from which a configuration has a line
_SURE = 1.2816  # standard deviations that 80% lie between


def fields(calibration: Calibration, seen: RunErrors | None, bad_rows: int) -> dict[str, Any]:
    keys = ("rows", "error_before", "error_after", "expected_before", "expected_after")
    families = {
        name: {**{key: getattr(family, key) for key in keys}, "formats": _formats(family)}
        for name, family in calibration.families.items()
    }
    runs = {} if seen is None else {
        "runs": [asdict(line) for line in seen.lines], "by_others": seen.by_others,
        "contradiction": seen.contradiction, "unseen": list(seen.unseen),
        "scales": {key: {**asdict(scale), "factor": scale.factor} for key, scale in calibration.scales.items()},
    }  # fmt: skip
    return {
        "gpu": calibration.gpu, "predictor": calibration.predictor, "rows": calibration.rows, "bad_rows": bad_rows,
        "families": families, **runs,
    }  # fmt: skip


def print_calibration(calibration: Calibration, seen: RunErrors | None) -> None:
    if calibration.families:
        show(
            f"{calibration.gpu}, {calibration.predictor}: mean error of calls that the correction did not see\n",
            _calls(calibration),
        )
    if seen is None:
        return
    how = "with what the other runs say" if seen.by_others else f"fitted ({LEAST_RUNS} runs or more are scored in turn)"
    if not calibration.families:
        show(f"{calibration.gpu}, {calibration.predictor}")
    show(f"runs, after: {how}\n", _runs(seen), "what they scale\n", _scales(calibration))
    if seen.contradiction > 1:
        show(f"runs contradict one another or the forecast: {seen.contradiction:.1f} times as far off as their noise")
    if seen.unseen:
        show(f"not seen, so not scaled: {', '.join(seen.unseen)}")


def _calls(calibration: Calibration) -> Table:
    """Errors of each family beside what was expected of it, and of each format of several."""
    numbers = ("rows", "error before", "expected", "error after", "expected ")
    table = plain_table("family", *numbers, right=numbers)
    for name, family in calibration.families.items():
        pairs = ((family.error_before, family.expected_before), (family.error_after, family.expected_after))
        table.add_row(name, f"{family.rows:,}", *(f"{error:.1f}%" for pair in pairs for error in pair))
        for form, errors_of in _formats(family).items() if len(family.formats) > 1 else ():
            errors = (errors_of["error_before"], None, errors_of["error_after"], None)
            table.add_row(
                f"  {form}", f"{errors_of['rows']:,}", *("" if error is None else f"{error:.1f}%" for error in errors)
            )
    return table


def _formats(family: FamilyCalibration) -> dict[str, dict[str, Any]]:
    """'gemm bf16': rows and errors; the values without their names."""
    return {
        " ".join(pair.partition("=")[2] for pair in form.split()): dict(
            zip(("rows", "error_before", "error_after"), errors, strict=True)
        )
        for form, errors in family.formats.items()
    }


def _runs(seen: RunErrors) -> Table:
    numbers = ("measured", "error before", "error after")
    table = plain_table("run", "of", *numbers, right=numbers)
    for line in seen.lines:
        table.add_row(line.run, line.what.removesuffix("_s"), time_text(line.measured_s), f"{line.error_before:+.1%}",
                      f"{line.error_after:+.1%}")  # fmt: skip
    if len(seen.lines) > 1:
        means = [sum(abs(error) for error in errors) / len(seen.lines) for errors in zip(
            *((line.error_before, line.error_after) for line in seen.lines), strict=True)]  # fmt: skip
        table.add_row("mean", "", "", *(f"{mean:.1%}" for mean in means))
    return table


def _scales(calibration: Calibration) -> Table:
    numbers = ("of the time", "runs", "scaled", "80% between", "before")
    table = plain_table("kernels", *numbers, right=numbers)
    ordered = sorted(calibration.scales.items(), key=lambda item: -abs(item[1].share))
    large = [(key, scale) for key, scale in ordered if abs(scale.share) >= _SHOWN]
    for key, scale in large:
        ends = _between(scale.log_scale, scale.sd), _between(0.0, scale.prior_sd)
        table.add_row(key, f"{scale.share:.0%}", f"{scale.runs}", f"x {scale.factor:.3f}", *ends)
    if len(large) < len(ordered):
        share = sum(abs(scale.share) for _, scale in ordered[len(large) :])
        table.add_row(f"{len(ordered) - len(large)} more", f"{share:.0%}", "", "", "", "")
    return table


def _between(log_scale: float, sd: float) -> str:
    return f"{exp(log_scale - _SURE * sd):.2f} to {exp(log_scale + _SURE * sd):.2f}"
