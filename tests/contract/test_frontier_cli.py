"""Frontier models from the command line: experts, guesses by a model's own layers, formats by checkpoint, and measured
deployments. Every measured number here is invented."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import duckdb
import pytest
from running import Run, instead, strict

from kernelcast.models.catalogue import bundled

QWEN = shlex.split("infer qwen3-30b-a3b --gpu h200_sxm --batch 1 --input-len 256 --output-len 8")
R1 = shlex.split("--gpu h200_sxm --tp 8 --draft-tokens 3")


def told(run: Run, *arguments: str | Path) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = strict(out)
    return found


def refused(run: Run, *arguments: str | Path) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kernelcast: error: ") and err.count("\n") == 1, err
    return err


# ---- experts ----


def test_a_kernel_that_others_beat_by_far_is_told(run: Run) -> None:
    assert told(run, *QWEN, "--dtype", "fp8")["faster_kernels"] == []
    found = told(run, *QWEN, "--dtype", "fp8", "--moe-backend", "cutlass")["faster_kernels"]
    decode = next(one for one in found if one["phase"] == "decode")
    assert set(decode) == {"phase", "op", "runs", "time_s", "faster", "faster_s"}
    assert decode["runs"] == {"stack": "vllm", "backend": "cutlass", "dtype": "fp8"}
    assert decode["time_s"] > 2 * decode["faster_s"] > 0
    _, out, _ = run(*QWEN, "--dtype", "fp8", "--moe-backend", "cutlass")
    assert re.search(r"^faster +decode: experts take [\d,]+ µs a layer as vllm's cutlass in fp8", out, re.MULTILINE)
    assert "faster " not in run(*QWEN, "--dtype", "fp8")[1]


def test_more_even_experts_are_not_slower(run: Run) -> None:
    """Of a prompt of 2,048 tokens: 128 rows an expert."""
    ways = ("--routing balanced", "--skew 1.01", "--skew 1.2", "")
    times = [told(run, *instead(QWEN, "--input-len", "2048", *way.split()))["ttft_s"] for way in ways]
    assert times == sorted(times)
    assert times[3] == times[2]  # what is expected unless told otherwise


def test_exchanges_and_links_change_the_answer(run: Run) -> None:
    spread = instead(QWEN, "--dp", "8", "--ep", "8", "--batch", "64")
    times = {told(run, *spread, "--exchange", name)["tpot_s"] for name in ("nccl", "allgather", "deepep", "alltoall")}
    assert len(times) == 4
    own, slow = (told(run, *spread, "--exchange", "nccl", *link)["tpot_s"] for link in ([], ["--fabric", "pcie4"]))
    assert own < slow


@pytest.mark.parametrize("command", ["infer qwen3-30b-a3b", "simulate qwen3-30b-a3b --request-rate 1 --num-prompts 2"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--routing even", "unknown routing 'even'; known: balanced, expected, identical, random"),
        ("--skew=-1", "skew must be 0 or more, not -1"),
        ("--exchange udp", "unknown exchange 'udp'; known: allgather, alltoall, deepep, nccl"),
        ("--moe-backend own", "unknown kernel of experts 'own'; known: cutlass, "),
        ("--fabric ether", "unknown fabric 'ether'; known: "),
        ("--between-nodes ether", "unknown fabric 'ether'; known: "),
    ],
)
def test_what_nobody_knows_is_refused_in_one_line(run: Run, command: str, given: str, said: str) -> None:
    assert said in refused(run, *shlex.split(f"{command} --gpu h200_sxm {given}"))


# ---- guesses ----


def test_own_layers_guess(run: Run) -> None:
    infer = shlex.split("infer deepseek-r1 --batch 2 --input-len 128 --output-len 16")
    plain, free, own = (
        told(run, *infer, *how)["tpot_s"] for how in (R1[:4], R1, [*R1, "--draft-model", "mtp", "--acceptance", "0.7"])
    )
    assert free < own < plain
    load = shlex.split("simulate deepseek-r1 --request-rate inf --num-prompts 3 --input-len 128 --output-len 16")
    plain, own = (told(run, *load, *how)["mean_tpot_ms"] for how in (R1[:4], [*R1, "--draft-model", "mtp"]))
    assert own < plain


@pytest.mark.parametrize("command", ["infer", "simulate"])
def test_a_model_without_such_layers_is_refused(run: Run, command: str) -> None:
    load = "--request-rate 1 --num-prompts 2" if command == "simulate" else ""
    asked = shlex.split(f"{command} llama-3.1-8b --gpu h200_sxm {load} --draft-model mtp")
    assert "llama-3.1-8b has no layers that predict further tokens" in refused(run, *asked, "--draft-tokens", "2")
    assert "--draft-model needs --draft-tokens" in refused(run, *asked)


# ---- checkpoints ----


def test_a_checkpoint_in_fp8_answers_where_its_arithmetic_is_missing(run: Run, tmp_path: Path) -> None:
    config = {key: value for key, value in bundled("llama-3.2-1b").items() if not key.startswith("_")}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    asked = ["infer", str(path), *shlex.split("--gpu a100_sxm --input-len 64 --output-len 4")]
    found = told(run, *asked)
    assert (found["precision"], found["weight_only"]) == ("fp8", ["fp8"])
    assert "fp8 as weights alone: a100_sxm has no such arithmetic" in run(*asked)[1]
    assert "a100_sxm has no fp8 matrix arithmetic" in refused(run, *asked, "--dtype", "fp8")
    assert told(run, *instead(asked, "--gpu", "h200_sxm"))["weight_only"] == []


# ---- measured deployments ----

_SIZES = {"tp_size": 1.0, "pp_size": 1.0, "attention_dp_size": 1.0, "moe_tp_size": None, "moe_ep_size": None}


def silicon(number: int, in_flight: int = 2, **changes: Any) -> dict[str, Any]:
    """Llama-3.1-8B on one H100, so many requests in flight."""
    row: dict[str, Any] = {
        "id": str(number), "silicon_data_source": f"notes; silicon_concurrency={in_flight}", "backend": "vllm",
        "backend_version": "0.14", "model_path": "meta-llama/Llama-3.1-8B", "system": "h100_sxm", "mode": "agg",
        "isl": 256, "osl": 16, "gemm_quant_mode": None, "moe_quant_mode": None, "batch_size": float(in_flight),
        **_SIZES, "silicon_ttft_ms": 20.0, "silicon_tpot_ms": 7.0,
    }  # fmt: skip
    for part in ("decode", "prefill"):
        row |= {f"{part}_{name}": None for name in (*_SIZES, "batch_size", "num_workers")}
    return {**row, **changes}


def split(number: int) -> dict[str, Any]:
    """One engine that reads prompts, two that decode one request each."""
    given: dict[str, Any] = {"mode": "disagg", "decode_num_workers": 2.0, "prefill_num_workers": 1.0,
                             "decode_batch_size": 1.0, "prefill_batch_size": 1.0}  # fmt: skip
    for part in ("decode", "prefill"):
        given |= {f"{part}_{name}": size for name, size in _SIZES.items()}
    return silicon(number, **given)


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "aiconfigurator").mkdir()
    marks = ", ".join("(" + ", ".join("?" * len(rows[0])) + ")" for _ in rows)
    names = ", ".join(rows[0])
    with duckdb.connect() as connection:
        query = f"COPY (SELECT * FROM (VALUES {marks}) AS t({names})) TO '{folder}/aiconfigurator/e2e_silicon.parquet'"
        connection.execute(query, [cell for row in rows for cell in row.values()])
    return folder


def test_measured_deployments_are_evaluated(run: Run, tmp_path: Path) -> None:
    rows = [
        silicon(0),
        silicon(1, in_flight=8),  # whose TTFT is a queue
        silicon(2, model_path="nobody/none"),
        silicon(3, batch_size=1.0),  # two engines behind a router
        split(4),
    ]
    found = told(run, "evaluate", "served", "--data", write(tmp_path, rows), "--source", "aiconfigurator")
    whole = {line["of"]: line for line in found["serving_points"]}
    assert (whole["TPOT"]["rows"], whole["TTFT"]["rows"]) == (2, 1)
    assert {line["of"]: line["rows"] for line in found["disaggregated"]} == {"TPOT": 1, "TTFT": 1}
    assert [(line["model"], line["of"]) for line in found["serving_points_by_model"]] == [
        ("meta-llama/Llama-3.1-8B", "TPOT"), ("meta-llama/Llama-3.1-8B", "TTFT"),
    ]  # fmt: skip
    answered = {line["which"]: line["points"] for line in found["points_answered"]}
    assert answered.pop("answered") == 2
    ((reason, count),) = answered.items()
    assert "nobody/none" in reason and count == 1
    unusable = {line["rule"]: line["rows"] for line in found["rows_not_usable"]}
    assert unusable == {"several_replicas": 1, "disaggregated": 1}


def test_a_source_that_nobody_knows_is_refused(run: Run, tmp_path: Path) -> None:
    given = ("evaluate", "served", "--data", tmp_path, "--source")
    assert "unknown source of served models 'inferencex'; known: aiconfigurator, pipeweave" in refused(
        run, *given, "inferencex"
    )
    assert "unknown table 'aiconfigurator/e2e_silicon'" in refused(run, *given, "aiconfigurator")
