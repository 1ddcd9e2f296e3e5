"""NeuSight's whole models: rows to cases, and the models as they were run. Every number in the tables is invented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.training.step import run_step
from kernelcast_lab.data.neusight import ModelCase, model_cases
from kernelcast_lab.evaluate.neusight import (
    CONFIGS,
    case_lines,
    compare,
    depth,
    group_lines,
    layout_of,
    mean_error,
    traced,
)


def row(**changes: Any) -> dict[str, Any]:
    cells = {
        "model": "bert_large", "mode": "inf", "seq": 32, "batch": 1, "gpu_name": "Tesla V100-PCIE-32GB",
        "measured_ms": 40.0, "measured_fw_ms": 40.0, "measured_bw_ms": 0.0, "neusight_ms": 44.0, "fused": False,
        "parallelism": "none", "num_gpus": 1, "vendor": "nvidia",
    }  # fmt: skip
    return {**cells, **changes}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "neusight" / "e2e.parquet"
    path.parent.mkdir()
    marks = ", ".join("(" + ", ".join("?" * len(rows[0])) + ")" for _ in rows)
    names = ", ".join(rows[0])
    with duckdb.connect() as connection:
        query = f"COPY (SELECT * FROM (VALUES {marks}) AS t({names})) TO '{path}' (FORMAT parquet)"
        connection.execute(query, [cell for cells in rows for cell in cells.values()])
    return folder


def test_rows_with_a_time_are_cases(tmp_path: Path) -> None:
    rows = [
        row(),
        row(mode="train", measured_ms=100.0, measured_fw_ms=30.0, measured_bw_ms=70.0, neusight_ms=None),
        row(measured_ms=None),
        row(mode="train", parallelism="dp4", num_gpus=4, measured_fw_ms=0.0, gpu_name="NVIDIA A100-SXM4-40GB"),
        row(gpu_name="AMD Instinct MI250", vendor="amd", fused=True),
    ]
    first, second, third, last = model_cases(write(tmp_path, *rows))
    assert (first.gpu, first.mode, first.measured_s, first.neusight_s) == ("v100_pcie", "inference", 0.04, 0.044)
    assert (first.forward_s, first.backward_s) == (0.04, 0.0)
    assert (second.mode, second.forward_s, second.backward_s, second.neusight_s) == ("training", 0.03, 0.07, None)
    assert (third.gpu, third.gpus, third.single, third.forward_s) == ("a100_sxm_40gb", 4, False, None)
    assert (last.gpu, last.fused, last.vendor) == ("mi250", True, "amd")


@pytest.mark.parametrize("changes", [{"mode": "test"}, {"gpu_name": "Voodoo 2"}])
def test_what_is_not_known_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(KernelcastError):
        model_cases(write(tmp_path, row(**changes)))


def test_errors_are_told_by_case_and_group(tmp_path: Path) -> None:
    found = compare(model_cases(write(tmp_path, row(), row(fused=True))))
    assert len(found) == 2 and found[1].predicted_s < found[0].predicted_s
    assert found[0].neusight_error == pytest.approx(10)
    assert mean_error(found, lambda case: case.fused) == pytest.approx(abs(found[1].error))
    assert [line["how"] for line in case_lines(found)] == ["", "fused"]
    assert any(line["group"] == "NVIDIA, one GPU, fused" for line in group_lines(found))


@pytest.mark.parametrize("model", CONFIGS)
def test_models_run_as_they_were_timed(model: str) -> None:
    """Gradients are added to those of the run before; the loss is not timed; scores pass through memory in parts."""
    forward, step = traced(model, "inference", 1, 32, 2), traced(model, "training", 1, 32, 2)
    assert {op.phase for op in forward.ops} == {"forward"}
    assert not any(op.name == "nll_loss_forward" for op in step.ops)
    assert any(op.name == "nll_loss_backward" for op in step.ops)
    assert sum(op.name == "add_" for op in step.phase("backward")) >= 0.9 * step.parameter_tensors
    softmax = [op for op in forward.ops if op.name == "_softmax" and op.inputs[0].shape[-2:] == (32, 32)]
    assert len(softmax) == (6 if model == "switchxl4" else 2)  # a decoder's layer looks at itself and at the encoder


def test_weights_are_as_many_as_published() -> None:
    """By what two layers more add."""
    billions = {}
    for model in CONFIGS:
        few, more = (traced(model, "inference", 1, 32, layers).parameters / 1e9 for layers in (2, 4))
        billions[model] = few + (more - few) / 2 * (depth(model) - 2)
    assert billions["gpt2_large"] == pytest.approx(0.774, rel=0.01)
    assert billions["opt_13"] == pytest.approx(1.316, rel=0.01)
    assert billions["gpt3_27"] == pytest.approx(2.65, rel=0.01)
    assert 16e9 / 4 < billions["switchxl4"] * 1e9 < 32e9 / 4  # measured on 32 GB, not on 16


@pytest.mark.slow
def test_layers_are_alike() -> None:
    """A prediction from few layers is that of all."""
    case = ModelCase(
        "a100_pcie", "bert_large", "training", 512, 2, False, "none", 1, "nvidia", 0.2, None, None, None
    )  # fmt: skip
    (found,) = compare([case])
    whole = run_step(traced(case.model, case.mode, case.batch, case.seq, depth(case.model)), gpu(case.gpu))
    assert found.predicted_s == pytest.approx(whole.time_s, rel=0.005)
    assert found.phases_s["backward"] == pytest.approx(whole.phase_s("backward"), rel=0.005)


@pytest.mark.parametrize(("name", "gpus", "passes"), [("dp4", 4, 1), ("tp2", 2, 1), ("pp4_2", 4, 2)])
def test_plans_of_several_gpus(name: str, gpus: int, passes: int) -> None:
    plan = layout_of(ModelCase("a100_sxm_40gb", "gpt2_large", "training", 32, 4, False, name, gpus, "nvidia", 1.0, None,
                             None, None))  # fmt: skip
    assert (plan.gpus, plan.micro_batches) == (gpus, passes)
    assert getattr(plan, name[:2]) == gpus


def test_a_plan_that_is_not_known_is_refused() -> None:
    case = ModelCase("a100_sxm_40gb", "gpt2_large", "training", 32, 4, False, "xp4", 4, "nvidia", 1.0, None, None, None)
    with pytest.raises(KernelcastError):
        layout_of(case)
