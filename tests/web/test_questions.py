"""POST: an answer is the command's own, and both ways to ask again give it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from web.conftest import problem_of

KERNELS: list[dict[str, Any]] = [
    {"op": "gemm", "gpu": "h200_sxm", "parameters": {"m": 4096, "n": 4096, "k": 4096}},
    {"op": "gemm", "gpu": "b200_sxm", "parameters": {"m": 7, "n": 8192, "k": 1024, "dtype": "fp8", "stack": "vllm"},
     "set": ["dram_bytes_per_s*1.5", "l2_bytes=2e8"], "cache": "warm"},
    {"op": "attention", "gpu": "a100_sxm", "cache": "cold", "predictor": "generic",
     "parameters": {"q_lens": [128, 64], "kv_lens": [1024, 64], "q_heads": 32, "kv_heads": 8, "head_dim": 128,
                    "causal": True}},
    {"op": "all_reduce", "gpu": "h100_sxm", "parameters": {"bytes": 67108864, "world": 8}},
    {"op": "rmsnorm", "gpu": "l40s", "parameters": {"rows": 4096, "cols": 4096}, "without": ["dram", "l2"]},
    {"op": "gemm", "gpu": "h100_sxm", "parameters": {"m": 8192, "n": 8192, "k": 8192}, "predictor": "roofline"},
    {"op": "gemm", "gpu": "h100_sxm", "parameters": {"m": 8192, "n": 8192, "k": 8192}, "power_cap": 400},
]  # fmt: skip
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("infer", {"model": "llama-3.1-8b", "gpu": "h200_sxm", "batch": 8, "input_len": 2048, "output_len": 256}),
    ("infer", {"model": "qwen3-30b-a3b", "gpu": "h100_sxm", "tp": 2, "stack": "sglang", "dtype": "fp8",
               "kv_dtype": "fp8", "set": ["dram_bytes_per_s*2"], "chunk": 512, "cached": 128}),
    ("infer", {"model": "llama-3.1-70b", "gpu": "h100_sxm", "tp": 4, "draft_tokens": 3, "acceptance": 0.8,
               "draft_model": "llama-3.2-1b", "power_cap": 500, "micro_batches": 1, "sequence_parallel": True}),
    ("infer", {"model": "bert-base", "gpu": "l40s", "stack": "torch", "input_len": 128, "batch": 4}),
    ("simulate", {"model": "llama-3.1-8b", "gpu": "h100_sxm", "request_rate": 4, "num_prompts": 20, "input_len": 256,
                  "output_len": 32, "goodput": ["ttft:500", "tpot:30"]}),
    ("simulate", {"model": "llama-3.2-1b", "gpu": "l40s", "max_concurrency": 4, "num_prompts": 12, "lengths": "uniform",
                  "random_range_ratio": 0.5, "intervals": False, "enable_prefix_caching": False, "replicas": 2,
                  "router": "least_loaded", "seed": 3, "output_len": 16, "arrivals": "constant", "request_rate": 2.5}),
    ("compare", {"model": "llama-3.2-1b", "gpus": ["l40s", "a100_sxm"], "batch": 2, "max_gpus": 1, "output_len": 16,
                 "what_if": ["dram_bytes_per_s*1.5"], "price": ["l40s=0.9"], "by": "latency", "tpot": "50ms"}),
    ("compare", {"model": "llama-3.2-1b", "gpus": "h100_sxm", "max_gpus": 1, "formats": ["bf16", "fp8"], "ttft": 500,
                 "output_len": 8, "sensitivity": True, "batch": 2}),
    ("train", {"model": "llama-3.2-1b", "gpus": "8xh100_sxm", "tp": 2, "global_batch": 64, "precision": "fp8_current",
               "recompute": "core_attn,mlp", "tokens": 1e9, "price": ["h100_sxm=2"], "sequence_parallel": True}),
    ("plan", {"model": "llama-3.2-1b", "gpus": ["l40s"], "max_gpus": 1, "tp": "1", "pp": "1", "dtype": "bf16",
              "request_rate": 2, "num_prompts": 20, "input_len": 64, "output_len": 8, "ttft_p99": "2s",
              "tpot_mean": 100, "disaggregated": "no", "max_num_seqs": "64", "max_num_batched_tokens": "2048"}),
]  # fmt: skip


def typed(run: Any, command: str) -> Any:
    """What the command prints."""
    words = shlex.split(command)
    assert words[0] == "kernelcast"
    code, out, err = run(*words[1:], "--json")
    assert code == 0, err
    return json.loads(out)


def ran(python: str, name: str = "forecast") -> Any:
    """What the lines of Python give."""
    names: dict[str, Any] = {}
    exec(python, names)
    return names[name]


@pytest.mark.parametrize("words", KERNELS, ids=lambda words: words["op"])
def test_a_kernel_is_the_commands(ask: Any, run: Any, words: dict[str, Any]) -> None:
    found = ask("kernel", **words)
    assert typed(run, found["command"]) == found["answer"]
    assert ran(found["python"]).time_s == pytest.approx(found["answer"]["time_s"], rel=1e-12)


@pytest.mark.parametrize(("question", "words"), MODELS, ids=lambda given: given if isinstance(given, str) else "")
def test_a_model_is_the_commands(ask: Any, run: Any, question: str, words: dict[str, Any]) -> None:
    found = ask(question, **words)
    printed = typed(run, found["command"])
    if question == "plan":  # which says how long it searched
        assert printed["searched"].pop("seconds") > 0 < found["answer"]["searched"].pop("seconds")
    assert printed == found["answer"]
    again, answer = ran(found["python"]), found["answer"]
    if question == "infer":
        assert again.total.value == pytest.approx(answer["total_s"], rel=1e-12)
    elif question == "simulate":
        assert again.metrics["mean_ttft_ms"] == pytest.approx(answer["mean_ttft_ms"], rel=1e-12)
    elif question == "train":
        assert again.step.time_s == pytest.approx(answer["time_s"], rel=1e-12)
    elif question == "compare":
        first = next(row for row in answer["rows"] if row["fits"])
        assert again.fitting[0].candidate.deployment.gpu.known_as == first["gpu"]
        assert len(again.fitting) == sum(row["fits"] for row in answer["rows"])
    else:
        assert again.choice is not None and len(again.front) == len(answer["front"]) > 0


def test_what_is_usual_is_left_out(ask: Any) -> None:
    found = ask("infer", model="llama-3.2-1b", gpu="h200_sxm", stack="vllm", tp=1, batch=None, set=None, dp=1)
    assert found["command"] == "kernelcast infer llama-3.2-1b --gpu h200_sxm"
    assert "forecast = kc.infer('llama-3.2-1b', 'h200_sxm')" in found["python"]
    kernel = ask("kernel", op="gemm", gpu="h200_sxm", parameters={"m": 8, "n": 8, "k": 8.0, "dtype": "bf16"})
    assert kernel["command"] == "kernelcast kernel gemm --m 8 --n 8 --k 8 --gpu h200_sxm"


def test_a_model_by_its_config(ask: Any, refused: Any, run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8,
              "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000, "hidden_act": "silu",
              "tie_word_embeddings": False, "max_position_embeddings": 4096}  # fmt: skip
    found = ask("infer", config=config, name="little-llama", gpu="h200_sxm", batch=4, input_len=256, output_len=16)
    assert found["answer"]["model"] == "little-llama" and "little-llama.json" in found["command"]
    (tmp_path / "little-llama.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert typed(run, found["command"]) == found["answer"]
    assert ran(found["python"]).total.value == pytest.approx(found["answer"]["total_s"], rel=1e-12)
    assert "not both" in refused(422, "infer", config=config, model="llama-3.1-8b", gpu="h200_sxm")
    assert "which model" in refused(422, "infer", gpu="h200_sxm")
    assert "layers" in refused(422, "infer", config={**config, "num_hidden_layers": 10**9}, gpu="h200_sxm")
    assert "at most" in refused(422, "infer", config={**config, "hidden_size": 10**15}, gpu="h200_sxm")
    assert "not supported" in refused(422, "infer", config={**config, "model_type": "none"}, gpu="h200_sxm")


def test_over_time_follows_the_load(ask: Any) -> None:
    found = ask("simulate", model="llama-3.2-1b", gpu="l40s", num_prompts=64, output_len=64, intervals=False,
                max_num_seqs=16, request_rate=100)  # fmt: skip
    told = found["over_time"]
    assert len({len(values) for values in told.values()}) == 1 and 1 < len(told["time_s"]) <= 400
    assert told["time_s"] == sorted(told["time_s"])
    assert max(told["running"]) == 16  # as many as may run
    assert 0 < max(told["waiting"]) <= 64 - 16 and told["waiting"][-1] == 0
    assert max(told["kv_share"]) == pytest.approx(found["answer"]["max_kv_cache_usage"], rel=0.2)


def test_the_same_question_is_answered_from_memory(client: TestClient) -> None:
    pool = client.app.state.service.pool  # type: ignore[attr-defined]
    asked = []
    ask = pool.run

    async def counted(*words: Any) -> Any:
        asked.append(words)
        return await ask(*words)

    pool.run = counted
    try:
        words = {"op": "gemm", "gpu": "h20", "parameters": {"m": 33, "n": 77, "k": 55}}
        first, second = (client.post("/api/v1/kernel", json=words) for _ in range(2))
        client.post("/api/v1/kernel", json={**words, "cache": "model"})  # the same, with what is usual said
    finally:
        pool.run = ask
    assert first.content == second.content and len(asked) == 1


@pytest.mark.parametrize(
    ("question", "words", "said"),
    [
        ("kernel", {"op": "gemm", "gpu": "h2000"}, "unknown gpu 'h2000' (did you mean gh200, h20, h200_sxm?)"),
        ("kernel", {"op": "gem", "gpu": "h20"}, "unknown op 'gem' (did you mean gemm"),
        ("kernel", {"op": "gemm", "gpu": "h20"}, "gemm needs m, n, k"),
        ("kernel", {"op": "gemm", "gpu": "h20", "parameters": {"m": 0, "n": 1, "k": 1}}, "m must be from 1 to"),
        ("kernel", {"op": "gemm", "gpu": "h20", "parameters": {"m": 1.5, "n": 1, "k": 1}}, "must be a whole number"),
        ("kernel", {"op": "gemm", "gpu": "h20", "parameters": {"m": "4", "n": 1, "k": 1}}, "m must be a number"),
        ("kernel", {"op": "gemm", "gpu": "h20", "parameters": {"m": 1, "n": 1, "k": 1, "q": 2}}, "unknown parameter"),
        ("kernel", {"gpu": "h20"}, "op is missing"),
        ("kernel", {"op": "gemm", "gpu": "h20", "color": 1}, "color: no such parameter here"),
        ("infer", {"model": "llama-9", "gpu": "h20"}, "unknown model 'llama-9' (did you mean"),
        ("infer", {"model": "llama-3.1-8b"}, "gpu is missing"),
        ("infer", {"model": "llama-3.1-8b", "gpu": "h20", "batch": 0}, "batch: input should be greater than or equal"),
        ("infer", {"model": "llama-3.1-8b", "gpu": "h20", "batch": True}, "batch: "),
        ("infer", {"model": "llama-3.1-8b", "gpu": "h20", "tp": 7}, "tp 7"),
        ("infer", {"model": "llama-3.1-405b", "gpu": "l40s"}, "its weights alone are too large"),
        ("infer", {"model": "llama-3.1-8b", "gpu": "h20", "set": ["sm_count"]}, "`set` takes FIELD=NUMBER"),
        ("infer", {"model": "llama-3.1-8b", "gpu": "h20", "calibration": "x"}, "calibration: no such parameter"),
        ("simulate", {"model": "llama-3.1-8b", "gpu": "h20"}, "which load?"),
        ("simulate", {"model": "llama-3.1-8b", "gpu": "h20", "num_prompts": 10**6}, "num_prompts: "),
        ("simulate", {"model": "llama-3.1-8b", "gpu": "h20", "stages": "1e9x1e9"}, "more than 100,000 requests"),
        ("simulate", {"model": "llama-3.1-8b", "gpu": "h20", "num_prompts": 1, "goodput": ["x:1"]}, "`goodput` takes"),
        ("compare", {"model": "llama-3.1-8b", "gpus": []}, "a list has 1 to"),
        ("compare", {"model": "llama-3.1-8b", "gpus": ["h20", "nope"]}, "unknown gpu 'nope'"),
        ("plan", {"model": "llama-3.1-8b", "request_rate": 1}, "which goal?"),
        ("plan", {"model": "llama-3.1-8b", "request_rate": 1, "ttft_p99": "soon"}, "`ttft_p99` takes a time"),
    ],
)  # fmt: skip
def test_bad_words_are_refused_in_the_commands_words(refused: Any, question: str, words: Any, said: str) -> None:
    assert said in refused(422, question, **words)


def test_diagnose_is_the_commands(client: TestClient, run: Any, monkeypatch: Any) -> None:
    folder = Path(__file__).parents[2] / "validation" / "profiles"
    monkeypatch.chdir(folder)
    for name, words in (("planted_faults.json.gz", "gpu=h200_sxm&dtype=bf16"), ("planted_waves.json.gz", ""),
                        ("ncu_metrics.csv", "gpu=h200_sxm")):  # fmt: skip
        response = client.post(f"/api/v1/diagnose?filename={name}&{words}", content=(folder / name).read_bytes())
        assert response.status_code == 200, response.text
        found = response.json()
        assert typed(run, found["command"]) == found["answer"]
        assert len(ran(found["python"], "diagnosis").matched) == len(found["answer"]["kernels"])


def test_diagnose_reads_tables_as_the_command_does(client: TestClient, run: Any, tmp_path: Path) -> None:
    import duckdb

    rows = [
        {"op": "gemm", "m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", "measured_us": 260.5, "count": 3},
        {"op": "rmsnorm", "rows": 4096, "cols": 4096, "measured_us": 40.0},
        {"op": "attention", "batch": 4, "q_len": 1, "kv_len": 2048, "q_heads": 32, "kv_heads": 8, "head_dim": 128,
         "causal": True, "measured_us": 30, "grid": "132x1x1"},
    ]  # fmt: skip
    lines = tmp_path / "t.jsonl"
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for ending, how in (("csv", "HEADER"), ("parquet", "FORMAT parquet")):
        duckdb.execute(f"COPY (SELECT * FROM read_json('{lines}')) TO '{tmp_path}/t.{ending}' ({how})")
    for ending in ("jsonl", "csv", "parquet"):
        path = tmp_path / f"t.{ending}"
        code, out, err = run("diagnose", path, "--gpu", "h200_sxm", "--json")
        assert code == 0, err
        response = client.post(f"/api/v1/diagnose?filename=t.{ending}&gpu=h200_sxm", content=path.read_bytes())
        assert response.status_code == 200, response.text
        assert response.json()["answer"] == json.loads(out), ending


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.json", b"{", "not JSON"),
        ("t.json", b"{}", "not a Chrome trace"),
        ("t.json", b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "no ts, dur or name"),
        ("t.json", b'{"traceEvents": [{"ph":"X","cat":"kernel","ts":1' + b"0" * 400 + b',"dur":1,"name":"k"}]}',
         "no ts, dur"),
        ("t.json", b"[" * 200_000, "deep"),
        ("t.json.gz", b"\x1f\x8bnothing", "damaged"),
        ("t.csv", b"op,m\ngemm,1\n", "no measured times"),
        ("t.csv", b"op,measured_us\ngemm\n", "row 2 has 1 cells"),
        ("t.csv", b"\xff\xfe\x00", "not"),
        ("t.jsonl", b'{"op": "gemm"}\n[1]\n', "line 2 is no JSON object"),
        ("t.jsonl", b'{"a": 1}\n', "needs a column 'op'"),
        ("t.parquet", b"PAR1nothing", "t.parquet"),
        ("t.exe", b"MZ", "unknown format"),
        ("t.jsonl", b'{"op": "gemm", "m": 1, "n": 1, "k": 1, "measured_us": 3, "gpu": "/etc/x.toml"}', "unknown gpu"),
        ("t.jsonl", b'{"op":"all_reduce","bytes":99,"world":2,"measured_us":3,"fabric":"/x.toml"}', "not read here"),
    ],
)  # fmt: skip
def test_diagnose_refuses(client: TestClient, name: str, content: bytes, said: str) -> None:
    where = "" if "gpu" in said else "&gpu=h200_sxm"
    response = client.post(f"/api/v1/diagnose?filename={name}{where}", content=content)
    assert response.status_code == 422, response.text
    assert said in problem_of(response)


def test_diagnose_refuses_a_bomb(client: TestClient) -> None:
    import gzip

    bomb = gzip.compress(b" " * 64 * 2**20)  # 64 MiB in 64 KiB; 8 may be unpacked here
    response = client.post("/api/v1/diagnose?filename=t.json.gz&gpu=h20", content=bomb)
    assert response.status_code == 422 and "decompressed" in problem_of(response)
