"""Steps of vLLM 0.22.1 on an H200 whose figures were noted (validation/vllm_h200/figures.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployments import deployed

import kernelcast as kc
from kernelcast.diagnose.step_kernels import step_kernels
from kernelcast.forecast.predict_table import Times
from kernelcast.inference.batch import Batch, BatchColumns
from kernelcast.inference.pass_times import kernel_tables
from kernelcast.serving.step_table import ProfiledStep
from kernelcast.stacks import stack

FIGURES = tomllib.loads(
    (Path(__file__).parents[2] / "validation" / "vllm_h200" / "figures.toml").read_text(encoding="utf-8")
)
# weights drawn at random route by chance
PLACE = replace(deployed("qwen3-30b-a3b", on="h200_sxm", engine=stack("vllm==0.22.1")), routing="random")


@pytest.mark.parametrize("noted", FIGURES["kernels"], ids=lambda noted: f"{noted['decodes']}+{noted['prompt']}")
def test_kernels_of_a_mixture_of_experts(noted: dict[str, Any]) -> None:
    ran = ProfiledStep(decodes=noted["decodes"], context=1050, prompts=1, prompt_tokens=noted["prompt"], events={})
    (found,) = step_kernels([ran], PLACE, kc.Conditions())
    moe, elementwise = (1e3 * found.predicted_s[part] for part in ("moe", "elementwise"))
    if "elementwise" in noted:  # the experts' activation is in the forecast of their layer
        assert moe + elementwise == pytest.approx(noted["moe"] + noted["elementwise"], rel=0.05)
        assert 1e3 * found.predicted_s["attention"] == pytest.approx(noted["attention"], rel=0.15)
    assert moe == pytest.approx(noted["moe"], rel=0.15)


def test_the_host_of_a_step_beyond_the_largest_graph() -> None:
    (table,) = kernel_tables(PLACE, [("", BatchColumns.of([Batch((1024,), (0,))]))], Times(PLACE.gpu))
    launched = table.launched(PLACE.stack)[:, 0]
    waits_s = PLACE.stack.waits_s(table.kernels_s[0, 0], launched, 1, graph=False, decodes=False)
    host_ms = 1e3 * (table.kernels_s[0, 0] + waits_s)
    assert host_ms == pytest.approx(FIGURES["host"]["prompt_alone"], rel=0.2)
    assert launched[1] / PLACE.stack.launch_s == pytest.approx(FIGURES["host"]["launches"], rel=0.05)
    least, most = FIGURES["host"]["with_decodes"]
    assert 0.7 * host_ms < least and most < 2.0 * host_ms  # machines differ by as much
