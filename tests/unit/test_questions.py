"""Questions: one set of words for Python, the command line and the web."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import kernelcast as kc
from kernelcast.app.cli.app import build
from kernelcast.app.cli.commands import with_flags
from kernelcast.app.questions import source
from kernelcast.app.questions.calibrate import CalibrateQuestion
from kernelcast.app.questions.compare import CompareQuestion, CompareTrainingQuestion
from kernelcast.app.questions.evidence import EvidenceQuestion
from kernelcast.app.questions.infer import InferQuestion
from kernelcast.app.questions.kernel import KernelQuestion, KernelsQuestion
from kernelcast.app.questions.measure import CollectQuestion, DiagnoseQuestion, TuneGemmQuestion, TuneMoeQuestion
from kernelcast.app.questions.parameters import command_parameters
from kernelcast.app.questions.plan import PlanQuestion
from kernelcast.app.questions.replay import ReplayQuestion
from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.app.questions.source import as_command, as_python
from kernelcast.app.questions.sweep import QueryQuestion, SweepQuestion
from kernelcast.app.questions.trace import TraceQuestion
from kernelcast.inference.disaggregated import Disaggregated

Run = Callable[..., tuple[int, str, str]]
QUESTIONS = (
    CalibrateQuestion, CollectQuestion, CompareQuestion, CompareTrainingQuestion, DiagnoseQuestion, EvidenceQuestion,
    InferQuestion, KernelQuestion, KernelsQuestion, PlanQuestion, QueryQuestion, ReplayQuestion, SimulateQuestion,
    SweepQuestion, TraceQuestion, TuneGemmQuestion, TuneMoeQuestion,
)  # fmt: skip

SOME = [
    InferQuestion(model="llama-3.1-8b", gpu="h200_sxm", batch=8, tp=2, set=["dram_bytes_per_s*2"], power_cap=500.0),
    InferQuestion(model="deepseek-v3", gpu="h200_sxm", dp=8, ep=8, stack="sglang", two_batch_overlap=True),
    InferQuestion(model="llama-3.1-8b", gpu="h100_sxm", batch=32, prefill_workers=2, prefill_tp=2, prefill_batch=4),
    SimulateQuestion(model="llama-3.2-1b", gpu="l40s", request_rate=4.0, num_prompts=20, enable_prefix_caching=False,
                     goodput=["ttft:500", "tpot:30"], intervals=False),
    CompareQuestion(model="llama-3.2-1b", gpus="h100_sxm,l40s", batch=4, what_if=["dram_bytes_per_s*1.5"]),
    PlanQuestion(model="llama-3.2-1b", gpus="l40s", request_rate=2.0, num_prompts=50, tpot_p99="60ms", tp="1", pp="1",
                 disaggregated="no"),
    KernelQuestion(op="gemm", parameters={"m": 64, "n": 512, "k": 256, "dtype": "fp8"}, gpu="h100_sxm"),
    KernelQuestion(op="gemm", parameters={"m": 1, "n": 4096, "k": 4096},
                   gpu=kc.gpu("h200_sxm").replace(dram_bytes_per_s=9.6e12)),
    InferQuestion(model="llama-3.1-8b", gpu=kc.gpu("h200_sxm").replace(dram_bytes_per_s=9.6e12)),
    KernelQuestion(op="attention", gpu="a100_sxm", cache="warm", predictor="generic",
                   parameters={"q_lens": [1, 2], "kv_lens": [64, 65], "q_heads": 8, "kv_heads": 8, "head_dim": 128,
                               "causal": True}),
]  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_parameter_is_called_as_one_of_its_flags(question: Any) -> None:
    for parameter in command_parameters(question):
        flags = {name.split("/")[0].removeprefix("--").replace("-", "_") for name in parameter.flags}
        assert not flags or parameter.name in flags, parameter.name
        assert parameter.help


@pytest.mark.parametrize("question", SOME, ids=lambda one: one.command)
def test_a_command_asks_the_same(question: Any, run: Run) -> None:
    command = shlex.split(as_command(question))
    assert command[:2] == ["kernelcast", question.command]
    code, out, err = run(*command[1:], "--json")
    assert (code, err) == (0, "")
    assert _figure(question, question.answer()) == pytest.approx(_told_figure(question, json.loads(out)), rel=1e-12)


@pytest.mark.parametrize("question", SOME, ids=lambda one: one.command)
def test_python_asks_the_same(question: Any) -> None:
    names: dict[str, Any] = {}
    exec(as_python(question), names)
    found = (names["forecast"], None) if question.command == "kernel" else names["forecast"]
    assert _figure(question, found) == pytest.approx(_figure(question, question.answer()), rel=1e-12)


def _figure(question: Any, found: Any) -> float:
    """The figure that an answer begins with."""
    if question.command == "kernel":
        return float(found[0].time_s)
    if question.command == "infer":
        return float(found.total.value)
    if question.command == "simulate":
        return float(found.metrics["mean_ttft_ms"])
    if question.command == "compare":
        return float(found.fitting[0].tpot.value)
    return float(found.choice.usd_per_hour)


def _told_figure(question: Any, told: dict[str, Any]) -> float:
    if question.command == "kernel":
        return float(told["time_s"])
    if question.command == "infer":
        return float(told["total_s"])
    if question.command == "simulate":
        return float(told["mean_ttft_ms"])
    if question.command == "compare":
        return float(told["rows"][0]["tpot_s"])
    return float(told["choice"]["usd_per_hour"])


def test_what_is_usual_is_left_out() -> None:
    question = InferQuestion(model="llama-3.1-8b", gpu="h200_sxm", tp=1, stack="vllm")
    assert as_command(question) == "kernelcast infer llama-3.1-8b --gpu h200_sxm"
    assert as_python(question) == "import kernelcast as kc\n\nforecast = kc.infer('llama-3.1-8b', 'h200_sxm')\n"


def test_types_for_editors_are_those_of_the_questions() -> None:
    assert source.STUB.read_text() == source.stub(), "run: python -m kernelcast.app.questions.source"


def test_functions_say_what_they_take() -> None:
    words = inspect.signature(kc.infer).parameters
    assert list(words)[:2] == ["model", "gpu"] and words["stack"].default == "vllm"
    assert "prompt tokens of each request" in str(kc.infer.__doc__)
    with pytest.raises(TypeError, match=r"unknown parameter of infer\(\) 'batches' \(did you mean batch"):
        kc.infer("llama-3.1-8b", "h200_sxm", batches=4)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"takes 2 arguments without names \(model, gpu\), not 3"):
        kc.infer("llama-3.1-8b", "h200_sxm", 4)  # type: ignore[call-overload]
    with pytest.raises(kc.KernelcastError, match="which GPU"):
        kc.infer("llama-3.1-8b")


def test_gpus_and_models_may_be_objects() -> None:
    from kernelcast import models

    fast = kc.gpu("h200_sxm").replace(dram_bytes_per_s=9.6e12)
    by_name = kc.infer("llama-3.1-8b", "h200_sxm", set=["dram_bytes_per_s=9.6e12"])
    assert kc.infer(models.model("llama-3.1-8b"), fast).total == by_name.total


def test_every_public_name_is_there() -> None:
    for name in kc.__all__:
        assert getattr(kc, name) is not None


def test_a_file_of_requests_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("input_tokens,output_tokens\n128,4\n256,8\n")
    assert kc.infer("llama-3.2-1b", "l40s", requests=path).output_tokens == 12
    with pytest.raises(kc.KernelcastError, match="leave out batch="):
        kc.infer("llama-3.2-1b", "l40s", requests=path, batch=2)


def test_prefill_workers_give_the_disaggregated_answer() -> None:
    question = InferQuestion(model="llama-3.1-8b", gpu="h100_sxm", batch=8, prefill_workers=2)
    result = question.answer()
    assert isinstance(result, Disaggregated) and result.pools.prefill.count == 2
    both = kc.infer("llama-3.1-8b", "h100_sxm", batch=8, prefill_workers=2), kc.infer_pools(
        "llama-3.1-8b", "h100_sxm", batch=8, prefill_workers=2)  # fmt: skip
    assert both[0].total == both[1].total == result.total


def test_parameters_of_prefill_workers_belong_together() -> None:
    with pytest.raises(kc.KernelcastError, match="prefill_tp= needs prefill_workers="):
        kc.infer("llama-3.1-8b", "h100_sxm", prefill_tp=2)  # type: ignore[call-overload]
    with pytest.raises(kc.KernelcastError, match="how many prefill workers"):
        kc.infer_pools("llama-3.1-8b", "h100_sxm")  # type: ignore[call-arg]
    with pytest.raises(kc.KernelcastError, match="leave out images="):
        kc.infer_pools("qwen3-vl-8b", "h100_sxm", prefill_workers=1, images=1)
    with pytest.raises(kc.KernelcastError, match="count of a pool must be 1 or more, not 0"):
        kc.infer_pools("llama-3.1-8b", "h100_sxm", prefill_workers=0)


def test_the_command_line_shows_flags_for_parameters(run: Run) -> None:
    code, _, err = run("infer", "llama-3.1-8b", "--gpu", "h100_sxm", "--prefill-tp", "2")
    assert code == 2 and "--prefill-tp needs --prefill-workers" in err and "`" not in err
    assert with_flags("max_num_seqs and `trace`, not a_file.csv or 'max_num_seqs'", _params("simulate")) == (
        "--max-num-seqs and --trace, not a_file.csv or 'max_num_seqs'"
    )


def _params(command: str) -> Any:
    return typer.main.get_command(build(command)).commands[command].params  # type: ignore[attr-defined]


# ---- wrong values, as Python gives them ----
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": "8"}, "batch= must be a whole number, not '8'"),
        ({"batch": 8.5}, "batch= must be a whole number, not 8.5"),
        ({"batch": True}, "batch= must be a whole number, not True"),
        ({"batch": 10**30}, f"batch= must be at most 1,048,576, not {10**30}"),
        ({"batch": 10**6000}, "not a number of more than 77 digits"),
        ({"input_len": 10**20}, "input_len= must be at most 16,777,216"),
        ({"tp": 10**20}, "tp= must be at most 2,147,483,647"),
        ({"tp": None}, "tp= must be a whole number, not None"),
        ({"acceptance": "most"}, "acceptance= must be a number, not 'most'"),
        ({"skew": float("nan")}, "skew= must be a number that a float can be, not nan"),
        ({"skew": 10**400}, "skew= must be a number that a float can be"),
        ({"stack": 5}, "stack= must be a text, not 5"),
        ({"gpu": 5}, "gpu= must be a text, a path or a Gpu, not 5"),
        ({"set": [5]}, "set= must be a list of texts, not [5]"),
        ({"sequence_parallel": "yes"}, "sequence_parallel= must be True or False, not 'yes'"),
        ({"model": 5}, "model= must be a text, a path or an Architecture, not 5"),
        ({"images": -1}, "images= must be 0 or more, not -1"),
        ({}, "which GPU? give gpu=, as in h200_sxm"),
    ],
)
def test_a_wrong_value_is_one_clear_error(given: dict[str, Any], said: str) -> None:
    usual = {"model": "llama-3.2-1b"} | ({"gpu": "h100_sxm"} if given else {})
    with pytest.raises(kc.KernelcastError) as error:
        kc.infer(**{**usual, **given})
    assert said in str(error.value) and "`" not in str(error.value)


def test_numbers_of_numpy_and_texts_alone_are_taken() -> None:
    usual = kc.infer("llama-3.2-1b", "h100_sxm", batch=8, set=["dram_bytes_per_s*2"])
    assert kc.infer("llama-3.2-1b", "h100_sxm", batch=np.int64(8), set="dram_bytes_per_s*2").total == usual.total  # type: ignore[call-overload]
    assert kc.changed("h100_sxm", "dram_bytes_per_s*2") == kc.changed(kc.gpu("h100_sxm"), ["dram_bytes_per_s*2"])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: kc.predict("gemm", "h100_sxm"), "a kernel call is a value such as kc.Gemm"),  # type: ignore[arg-type]
        (lambda: kc.predict_table(5, "h100_sxm"), "a table is columns by name"),  # type: ignore[arg-type]
        (lambda: kc.evidence(op=5), "evidence() takes names, or lists of names, not 5"),  # type: ignore[arg-type]
        (lambda: kc.fabric(5), "unknown fabric '5'"),  # type: ignore[arg-type]
        (lambda: kc.simulate("llama-3.2-1b", "l40s", request_rate="4"), "request_rate= must be a number"),  # type: ignore[arg-type]
        (lambda: kc.simulate("llama-3.2-1b", "l40s", request_rate=4, num_prompts=10**11), "at most 10,000,000"),
    ],
)
def test_other_functions_too(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(kc.KernelcastError, match=re.escape(said)):
        call()


def test_the_command_line_says_the_same_of_huge_numbers(run: Run) -> None:
    for flag, most in (("--batch", "1,048,576"), ("--input-len", "16,777,216"), ("--tp", "2,147,483,647")):
        code, _, err = run("infer", "llama-3.2-1b", "--gpu", "h100_sxm", flag, "9" * 20)
        assert code == 2 and f"{flag} must be at most {most}, not {'9' * 20}" in err
    code, _, err = run(
        "simulate", "llama-3.2-1b", "--gpu", "h100_sxm", "--request-rate", "4", "--num-prompts", "9" * 11
    )
    assert code == 2 and "--num-prompts must be at most 10,000,000" in err


def test_a_kernel_takes_its_gpu_by_name_as_models_do() -> None:
    call = kc.Gemm(m=64, n=64, k=64)
    assert kc.predict(call, gpu="h100").time_s == kc.predict_many([call], gpu="h100_sxm")[0].time_s
    table = {"op": ["gemm"], "m": [64], "n": [64], "k": [64]}
    assert kc.predict_table(table, gpu="h100")["predicted_us"][0] == pytest.approx(
        kc.predict(call, "h100").time_s * 1e6
    )
    assert "llama-3.1-8b" in kc.model_ids() and "h100_sxm" in kc.gpu_ids()


def test_dir_shows_the_public_names() -> None:
    names = dir(kc)
    assert {"infer", "infer_pools", "simulate", "compare", "plan", "trace", "evidence", "gpu", "Gemm"} <= {*names}
    assert not {"importlib", "annotations", "TYPE_CHECKING", "Any"} & {*names}
    for name in names:
        assert getattr(kc, name) is not None


def test_both_functions_have_the_pools_of_infer() -> None:
    sizes: dict[str, Any] = {"batch": 32, "prefill_workers": 2, "prefill_tp": 2, "decode_workers": 3}
    one, two = kc.infer("llama-3.1-8b", "h100_sxm", **sizes), kc.infer_pools("llama-3.1-8b", "h100_sxm", **sizes)
    assert isinstance(one, Disaggregated) and isinstance(two, Disaggregated)
    for found in (one, two):
        assert (found.pools.prefill.count, found.pools.decode.count) == (2, 3)
        assert found.pools.prefill.deployment.layout.tp == 2
    assert one.total == two.total


def test_a_model_is_traced_by_its_name() -> None:
    pytest.importorskip("torch")
    trace = kc.trace("gpt2", batch=1, seq=16)
    step = kc.trace("gpt2", "h100_sxm", batch=1, seq=16)
    assert kc.run_step(trace, kc.gpu("h100_sxm")).kernel_time_s == pytest.approx(step.kernel_time_s, rel=0.01)  # type: ignore[union-attr]
    with pytest.raises(
        kc.KernelcastError, match="without gpu= there is no forecast, only the traced ops: leave out dp="
    ):
        kc.trace("gpt2", batch=1, dp=2)
    with pytest.raises(kc.KernelcastError, match="unknown parameter of trace"):
        kc.trace("gpt2", batches=1)  # type: ignore[call-overload]
