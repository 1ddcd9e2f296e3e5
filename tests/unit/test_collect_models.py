"""Measuring whole models, as far as it needs no GPU: cases, budget and resuming, traces, files, errors."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kernelcast.app.cli import app
from kernelcast.collect.session import DeviceLostError
from kernelcast.diagnose.chrome_events import NAME_CHARS, shape_text, short_name
from kernelcast.errors import KernelcastError
from kernelcast_lab.cli import models as cli_models
from kernelcast_lab.collect.cases import MODELS, Case, case_table, chosen, parameter_count, with_layers
from kernelcast_lab.collect.measure import measure, measure_parts
from kernelcast_lab.collect.store import Journal, Measured, StepTiming, Timing, load_cases, pack
from kernelcast_lab.collect.trace import (
    KernelRow,
    OpRow,
    Other,
    summarise,
    with_ops,
)

TABLE = case_table()


# --- cases


def test_table_covers_every_model_and_mode_first() -> None:
    assert 60 <= len(TABLE) <= 80
    assert len({case.id for case in TABLE}) == len(TABLE)
    first = TABLE[:51]
    for model in MODELS:
        modes = {case.mode for case in first if case.model == model}
        assert modes == ({"prefill", "training"} if model == "bert-large" else {"prefill", "decode", "training"})
    assert TABLE[0].id == "llama-3.1-8b/l32/prefill/eager/bf16/b1/s512"


def test_cases_can_run() -> None:
    for case in TABLE:
        config = MODELS[case.model]
        assert case.seq <= (config.get("max_position_embeddings") or config["n_positions"])
        assert case.launch == "eager" or case.mode == "decode"
        assert case.dtype == "bf16" or case.mode == "training"


def test_a_model_is_built_seldom() -> None:
    kinds = [(case.model, case.dtype == "bf16") for case in TABLE]
    builds = 1 + sum(a != b for a, b in pairwise(kinds))
    assert builds == 16  # 7 models and BERT in fp32, then 6 models and GPT-2 and BERT in fp32


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("llama-3.1-8b", 8_030_261_248),  # safetensors index on the hub: 16,060,522,496 bytes in bf16
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-4b", 4_022_468_096),
        ("gpt2-xl", 1_557_611_200),
        ("opt-1.3b", 1_315_758_080),
        ("bert-large", 335_174_458),  # without the pooler, with the masked-LM head
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_parameters_from_the_facts(model: str, weights: int) -> None:
    assert parameter_count(MODELS[model]) == weights


def test_parameters_of_fewer_layers() -> None:
    # A layer of Qwen3-30B-A3B: q and o 2 x 2048 x 4096, k and v 2 x 2048 x 512, 2 head norms of 128, 128 experts of
    # 3 x 2048 x 768, a router of 128 x 2048, 2 norms of 2048.
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 256 + 128 * 3 * 2048 * 768 + 128 * 2048 + 4096
    full = MODELS["qwen3-30b-a3b"]
    assert parameter_count(full) - parameter_count(with_layers(full, 12)) == 36 * layer


def test_only() -> None:
    assert {case.model for case in chosen(["llama", "opt"])} == {"llama-3.1-8b", "opt-1.3b"}
    assert chosen([]) == TABLE
    with pytest.raises(KernelcastError, match="no case holds 'mistral'"):
        chosen(["llama", "mistral"])


# --- a small trace, by hand: a training step of one product, its gradient, and the optimizer


def _span(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def _kernel(name: str, ts: float, dur: float, external: int | None, correlation: int, grid: int) -> dict[str, Any]:
    more = {} if external is None else {"External id": external}
    shape = {"grid": [grid, 1, 1], "block": [128, 1, 1], "registers per thread": 168, "shared memory": 65536}
    return _span("kernel", name, ts, dur, correlation=correlation, **shape, **more)


TRACE: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    _span("user_annotation", "ProfilerStep#1", 0, 100),
    _span("user_annotation", "kernelcast.forward", 0, 20),
    _span("user_annotation", "kernelcast.backward", 20, 20),
    _span("user_annotation", "kernelcast.optimizer", 40, 20),
    _span("cpu_op", "aten::mm", 1, 5, **{"External id": 7, "Input Dims": [[512, 4096], [4096, 4096]]}),
    _span("cpu_op", "aten::mm", 21, 5, **{"External id": 8, "Input Dims": [[4096, 512], [512, 4096]]}),
    _span("cpu_op", "aten::_fused_adamw_", 41, 5, **{"External id": 9, "Input Dims": [[[4], [4]], [], [[1], [1]]]}),
    _span("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=101),
    _span("cuda_runtime", "cudaLaunchKernelExC", 22, 1, correlation=102),
    _span("cuda_driver", "cuLaunchKernelEx", 24, 1, correlation=103),
    _span("cuda_runtime", "cudaLaunchKernel", 42, 1, correlation=104),
    _span("cuda_runtime", "cudaMemsetAsync", 70, 1, correlation=105),
    _kernel("nvjet_a", 50, 40, 7, 101, 64),
    _kernel("nvjet_a", 90, 60, 8, 102, 64),
    _kernel("nvjet_a", 150, 30, 8, 103, 132),
    _kernel("void at::native::adam<float>", 200, 869.95, 9, 104, 264),
    _span("gpu_memset", "Memset (Device)", 1200, 0.05, correlation=105),
]  # fmt: skip


def test_sums_of_a_trace() -> None:
    profile = summarise(TRACE)
    assert profile.kernel_sum_ms == pytest.approx(1.0)  # 40 + 60 + 30 + 869.95 + 0.05 us
    assert profile.span_ms == pytest.approx(1.15005)  # from 50 to 1200.05 us
    assert (profile.kernel_calls, profile.host_launches) == (5, 4)
    expected = {"forward": 0.04, "backward": 0.09, "optimizer": 0.86995, "step": 0.00005}
    assert profile.phase_ms == pytest.approx(expected)


def test_rows_of_a_trace() -> None:
    profile = summarise(TRACE)
    adam = KernelRow("adam<float>", (264, 1, 1), (128, 1, 1), 168, 65536, 1, 869.95)
    assert profile.kernels == (
        adam,
        KernelRow("nvjet_a", (64, 1, 1), (128, 1, 1), 168, 65536, 2, 100.0),
        KernelRow("nvjet_a", (132, 1, 1), (128, 1, 1), 168, 65536, 1, 30.0),
    )
    assert profile.ops == (
        OpRow("optimizer", "aten::_fused_adamw_", "[2],-,[2]", "adam<float>", 1, 869.95),
        OpRow("backward", "aten::mm", "4096x512,512x4096", "nvjet_a", 2, 90.0),
        OpRow("forward", "aten::mm", "512x4096,4096x4096", "nvjet_a", 1, 40.0),
    )
    assert profile.other_kernels == profile.other_ops == Other(1, 0.05)  # the memset, 0.005% of the time


def test_a_replayed_graph_alone_has_no_ops() -> None:
    launch = _span("cuda_runtime", "cudaGraphLaunch", 0, 1, correlation=1)
    profile = summarise([launch, _kernel("a", 5, 2, None, 1, 1), _kernel("b", 7, 3, None, 1, 1)])
    assert (profile.kernel_calls, profile.host_launches, profile.ops) == (2, 1, ())
    assert profile.phase_ms == {"step": 0.005}


def test_a_replayed_graph_takes_the_ops_of_the_eager_step() -> None:
    launch = _span("cuda_runtime", "cudaGraphLaunch", 0, 1, correlation=1)
    op = _span("cpu_op", "aten::mm", 1, 5, **{"External id": 7, "Input Dims": [[1, 8], [8, 8]]})
    eager = [op, _kernel("b", 20, 9, 8, 3, 1), _kernel("a", 5, 9, 7, 2, 1)]
    replayed = [launch, _kernel("a", 5, 2, None, 1, 1), _kernel("b", 7, 3, None, 1, 1)]
    profile = summarise(with_ops(replayed, eager))
    assert (profile.kernel_sum_ms, profile.host_launches) == (0.005, 1)  # times are those of the replay
    assert profile.ops == (OpRow("step", "", "", "b", 1, 3.0), OpRow("step", "aten::mm", "1x8,8x8", "a", 1, 2.0))
    assert summarise(with_ops(replayed, eager[:2])).ops == ()  # other kernels: no ops rather than wrong ones


def test_a_trace_without_kernels_is_refused() -> None:
    with pytest.raises(KernelcastError, match="no kernel"):
        summarise([event for event in TRACE if event.get("cat") == "cpu_op"])


def test_long_names_stay_apart() -> None:
    long = "void cutlass::device_kernel<" + "cute::tuple<" * 40
    names = {short_name(long + end) for end in ("a", "b")}
    assert len(names) == 2
    assert all(len(name) == NAME_CHARS for name in names)


def test_long_shapes_are_cut() -> None:
    assert len(shape_text([[n, n] for n in range(1000, 1100)])) == 200
    assert shape_text([[2, 3], [], 5]) == "2x3"


# --- running: budget, resuming, failures

MEASURED = Measured(
    wall=StepTiming(2.0, 1.9, 2.2),
    gpu=StepTiming(1.8, 1.7, 1.9),
    repeats=30,
    profile=summarise(TRACE),
    parameters=8,
    peak_memory_bytes=1 << 30,
)


class _Clock:
    """A clock that only moves when a case runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Runner:
    """Takes 10 s for each case, and fails where it is told to."""

    def __init__(self, clock: _Clock, failing: Callable[[Case], Exception | None] = lambda case: None) -> None:
        self.clock, self.failing, self.ran = clock, failing, list[str]()

    def __call__(self, case: Case) -> Measured:
        self.clock.now += 10.0
        self.ran.append(case.id)
        if error := self.failing(case):
            raise error
        return MEASURED


def test_budget_and_resuming(tmp_path: Path) -> None:
    journal, clock = Journal(tmp_path / "new" / "run.jsonl"), _Clock()
    runner = _Runner(clock)
    # 10 s each: after three cases 5 s are left, and the next is expected to take 10.
    assert measure(TABLE[:5], runner, journal, 35.0, "a", clock=clock) == (3, 0, 2)
    assert measure(TABLE[:5], runner, journal, 60.0, "b", clock=clock) == (2, 0, 0)
    assert runner.ran == [case.id for case in TABLE[:5]]
    assert measure(TABLE[:5], runner, journal, 60.0, "c", clock=clock) == (0, 0, 0)
    assert len(runner.ran) == 5


def test_every_case_is_timed_before_one_is_profiled(tmp_path: Path) -> None:
    """A profiler that ran once slows every launch of its process."""
    told = {field: value for field, value in vars(MEASURED).items() if field != "profile"}
    ran: list[tuple[str, str]] = []

    class Runner:
        def timed(self, case: Case) -> Timing:
            ran.append(("timed", case.id))
            if case is TABLE[1]:
                raise MemoryError("full")
            return Timing(**told)

        def profiled(self, case: Case, timing: Timing) -> Measured:
            ran.append(("profiled", case.id))
            return Measured(**vars(timing), profile=MEASURED.profile)

    journal = Journal(tmp_path / "run.jsonl")
    late = iter([0.0, 1e6])  # no time for the first part: the second does not begin
    assert measure_parts(TABLE[:3], Runner(), journal, late.__next__, "a") == (0, 0, 3)
    assert not ran and not journal.done()
    assert measure_parts(TABLE[:3], Runner(), journal, lambda: 1e6, "b") == (2, 1, 0)
    ids = [case.id for case in TABLE[:3]]
    assert ran == [*(("timed", name) for name in ids), ("profiled", ids[0]), ("profiled", ids[2])]
    journal.append({"kind": "environment", "run": "b", "facts": {}})
    pack(journal.path, tmp_path / "packed.json.gz")
    assert [one.measured for one in load_cases(tmp_path / "packed.json.gz")] == [MEASURED, MEASURED]


def test_the_parts_of_a_model_of_the_zoo_are_joined(tmp_path: Path) -> None:
    zoo = pytest.importorskip("kernelcast_lab.collect.zoo")
    first, second = ({"build": f"vision.py:{name}", "mode": "inference", "dtype": "bf16", "optimizer": "adamw",
                      "batch": 8, "seq": 0} for name in ("a", "b"))  # fmt: skip
    lines = [{"environment": {"gpu": "x"}}, {"case": first, "part": "wall", "wall_ms": [2.0, 1.0, 3.0]},
             {"case": second, "part": "wall", "wall_ms": [5.0, 5.0, 5.0]},
             {"case": first, "part": "kernels", "kernel_ms": 1.5, "kernels": 7},
             {"case": second, "part": "kernels", "error": "full"}]  # fmt: skip
    (tmp_path / "zoo.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert zoo.pack_zoo(tmp_path / "zoo.jsonl", tmp_path / "zoo.json.gz") == (1, 1)
    (kept,) = json.loads(gzip.decompress((tmp_path / "zoo.json.gz").read_bytes()))["cases"]
    assert (kept["case"], kept["wall_ms"], kept["kernel_ms"], kept["kernels"]) == (first, [2.0, 1.0, 3.0], 1.5, 7)


def test_no_time_no_case(tmp_path: Path) -> None:
    clock = _Clock()
    runner = _Runner(clock)
    assert measure(TABLE[:5], runner, Journal(tmp_path / "run.jsonl"), 4.0, "a", clock=clock) == (0, 0, 5)
    assert runner.ran == []


def test_a_failed_case_is_recorded_and_skipped(tmp_path: Path) -> None:
    journal, clock = Journal(tmp_path / "run.jsonl"), _Clock()
    full = _Runner(clock, lambda case: MemoryError("CUDA out of\n memory") if case.batch == 8 else None)
    said: list[str] = []
    assert measure(TABLE[:4], full, journal, 1e6, "a", clock=clock, say=said.append) == (3, 1, 0)
    assert said[0] == f"{TABLE[0].id}: 2.000 ms, kernels 1.000 ms in 5 (10.0 s)"
    assert said[2] == f"{TABLE[2].id}: failed after 10.0 s: MemoryError: CUDA out of memory"
    again = _Runner(clock)
    assert measure(TABLE[:4], again, journal, 1e6, "b", clock=clock) == (0, 0, 0)
    assert measure(TABLE[:4], again, journal, 1e6, "c", retry=True, clock=clock) == (1, 0, 0)
    assert again.ran == [TABLE[2].id]
    assert measure(TABLE[:4], again, journal, 1e6, "d", retry=True, clock=clock) == (0, 0, 0)


def test_a_lost_device_ends_the_run(tmp_path: Path) -> None:
    journal, clock = Journal(tmp_path / "run.jsonl"), _Clock()
    runner = _Runner(clock, lambda case: DeviceLostError("illegal access") if case is TABLE[1] else None)
    with pytest.raises(KernelcastError, match="illegal access; start again with the same file"):
        measure(TABLE[:4], runner, journal, 1e6, "a", clock=clock)
    assert journal.done() == {TABLE[0].id, TABLE[1].id}


def test_a_line_cut_off_is_measured_again(tmp_path: Path) -> None:
    journal, clock = Journal(tmp_path / "run.jsonl"), _Clock()
    measure(TABLE[:2], _Runner(clock), journal, 1e6, "a", clock=clock)
    content = journal.path.read_bytes()
    journal.path.write_bytes(content[:-100])
    again = _Runner(clock)
    measure(TABLE[:2], again, journal, 1e6, "a", clock=clock)
    assert again.ran == [TABLE[1].id]
    assert journal.path.read_bytes() == content


# --- the kept form


def _journal(folder: Path) -> Path:
    journal, clock = Journal(folder / "run.jsonl"), _Clock()
    journal.append({"kind": "environment", "run": "a", "facts": {"gpu": "NVIDIA H200", "before": {"clocks.sm": "345"}}})
    runner = _Runner(clock, lambda case: MemoryError("too large") if case is TABLE[1] else None)
    measure((*TABLE[:2], *chosen(["qwen3-30b"])[:1]), runner, journal, 1e6, "a", clock=clock)
    journal.append({"kind": "environment", "run": "a", "facts": {"after": {"clocks.sm": "1980"}}})
    return journal.path


def test_pack_and_load(tmp_path: Path) -> None:
    packed = tmp_path / "validation" / "models_h200_sxm.json.gz"
    assert pack(_journal(tmp_path), packed) == (2, 1)
    first, moe = load_cases(packed)
    assert first.case == TABLE[0]
    assert first.config == MODELS["llama-3.1-8b"]
    assert first.measured == MEASURED
    profile = first.measured.profile
    assert (first.wall_ms, first.kernel_sum_ms, len(profile.kernels), len(profile.ops)) == (2.0, 1.0, 3, 3)
    assert first.environment == {"gpu": "NVIDIA H200", "before": {"clocks.sm": "345"}, "after": {"clocks.sm": "1980"}}
    assert moe.config["num_hidden_layers"] == 12
    bytes_before = packed.read_bytes()
    pack(tmp_path / "run.jsonl", packed)
    assert packed.read_bytes() == bytes_before  # the same content, the same file
    assert json.loads(gzip.decompress(bytes_before))["failed"] == [
        {"id": TABLE[1].id, "error": "MemoryError: too large"}
    ]


def test_rows_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    packed = tmp_path / "models.json.gz"
    pack(_journal(tmp_path), packed)
    content = json.loads(gzip.decompress(packed.read_bytes()))
    content["cases"][0]["measured"]["profile"]["kernels"].pop()  # 30 us in one call
    packed.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(KernelcastError, match=r"add up to 0\.970 ms in 4 calls, not to 1\.000 ms in 5"):
        load_cases(packed)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    with pytest.raises(KernelcastError, match="no such file"):
        load_cases(tmp_path / "none.json.gz")
    with pytest.raises(KernelcastError, match="no such file"):
        pack(tmp_path / "none.jsonl", tmp_path / "out")
    text = tmp_path / "text.json.gz"
    text.write_text("{}")
    with pytest.raises(KernelcastError, match="not a gzipped JSON file"):
        load_cases(text)
    text.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(KernelcastError, match="not a file of measured models"):
        load_cases(text)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"a": 1}\n')
    with pytest.raises(KernelcastError, match="line 1 is not a record"):
        pack(lines, tmp_path / "out")
    lines.write_text("one\n{}\n")
    with pytest.raises(KernelcastError, match="line 1 is not JSON"):
        pack(lines, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_packed_size(tmp_path: Path) -> None:
    """As many rows as a real run has: 73 cases of 60 kernels and 80 ops stay under 1.5 MB."""
    profile = MEASURED.profile
    kernels = tuple(KernelRow(f"kernel_{i}" * 12, (i, 1, 1), (128, 1, 1), 32, 0, 1, i + 0.123) for i in range(60))
    ops = tuple(OpRow("step", "aten::mm", f"{i}x{i},{i}x4096", f"kernel_{i}" * 12, 1, i + 0.123) for i in range(80))
    rows = replace(MEASURED, profile=replace(profile, kernels=kernels, ops=ops))
    journal = Journal(tmp_path / "run.jsonl")
    journal.append({"kind": "environment", "run": "a", "facts": {}})
    measure(TABLE, lambda case: rows, journal, 1e6, "a")
    pack(journal.path, tmp_path / "out.json.gz")
    assert (tmp_path / "out.json.gz").stat().st_size < 1.5e6


# --- the command

Main = Callable[[list[str]], int]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """``kernelcast collect-models …`` in this process; its exit code."""
    monkeypatch.setattr(app, "COMMANDS", (*app.COMMANDS, cli_models))
    return lambda words: app.main(["collect-models", *words])


def test_list(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "llama"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "llama-3.1-8b/l32/prefill/eager/bf16/b1/s512  8.03e9 weights"
    assert out[-1] == "15 cases"
    assert main(["--list", "--only", "llama", "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)
    assert len(weights) == 15 and set(weights.values()) == {8_030_261_248}


def test_the_example_runs(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    example = capsys.readouterr().out.partition("Example:")[2].split()
    assert example[:2] == ["kernelcast", "collect-models"] and main(example[2:]) == 0


def test_packing(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "models.json.gz"
    assert main(["--pack", str(_journal(tmp_path)), "-o", str(packed), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"file": str(packed), "measured": 2, "failed": 1, "bytes": packed.stat().st_size}


@pytest.mark.parametrize(
    ("words", "missing", "says"),
    [
        (["-o", "x.jsonl"], "torch", "needs torch, which is not installed"),
        (["-o", "x.jsonl"], "transformers", "needs transformers, which is not installed"),
        ([], None, "give -o FILE.jsonl"),
        (["--only", "mistral", "--list"], None, "no case holds 'mistral'"),
        (["--pack", "none.jsonl", "-o", "out.json.gz"], None, "none.jsonl: no such file"),
        (["--budget", "soon", "-o", "x.jsonl"], None, "is no time"),
    ],
)
def test_error_lines(
    main: Main,
    words: list[str],
    missing: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    assert main(words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_cuda(main: Main, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["-o", "x.jsonl"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_the_script_needs_little() -> None:
    """A machine with a GPU need not have what the rest of the package wants."""
    code = "import json, sys, kernelcast_lab.collect.measure; print(json.dumps(list(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"duckdb", "typer", "rich", "torch", "transformers"} & set(json.loads(out))
