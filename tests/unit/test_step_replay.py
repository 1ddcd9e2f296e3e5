"""Steps of an engine beside their forecasts, and the overheads that they determine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from step_tables import PROFILED, STEPS, as_forecast, forecast, step, written

import kernelcast as kc
from kernelcast.app.questions.replay import ReplayQuestion, engine_service
from kernelcast.collect.calibrate.run_files import read_input
from kernelcast.diagnose.kernel_names import engine_part, is_launch, runs_on_gpu
from kernelcast.diagnose.step_kernels import step_kernels
from kernelcast.errors import KernelcastError
from kernelcast.serving.service import EnginePool, read_overheads, write_overheads
from kernelcast.serving.step_calibration import calibrate_steps
from kernelcast.serving.step_replay import as_measured, replay_steps, step_seconds
from kernelcast.serving.step_table import read_steps
from kernelcast.serving.step_times import StepTimeTables, step_time_tables
from kernelcast.stacks import stack

LIVE = sorted((Path(__file__).parents[2] / "validation" / "engine_steps").glob("*.jsonl*"))


@pytest.fixture(scope="module")
def tables() -> StepTimeTables:
    return step_time_tables()


def test_a_file_says_which_engine_ran(tmp_path: Path) -> None:
    path = written(
        tmp_path / "steps.jsonl", release="0.15.0rc1+cu129", tp=2, max_num_seqs=64, kv_cache_dtype="fp8_e4m3"
    )
    service, assumed = engine_service(read_steps(path), ReplayQuestion(bench=path), None, set())
    deployment, settings = service.pool.deployment, service.pool.settings
    assert (deployment.gpu.id, deployment.layout.tp, deployment.precision.cache) == ("h200_sxm", 2, "fp8")
    assert (deployment.stack.release, deployment.stack.id, settings.max_num_seqs) == ("0.15.0", "vllm==0.14", 64)
    assert assumed == [] and deployment.stack.memory_share == 0.92
    given = ReplayQuestion(bench=path, tp=1, stack="vllm", max_num_seqs=32)
    service, _ = engine_service(read_steps(path), given, None, {"tp", "stack", "max_num_seqs"})
    assert (service.pool.deployment.layout.tp, service.pool.settings.max_num_seqs) == (1, 32)


@pytest.mark.parametrize(
    ("model", "engine", "weights"),
    [
        ("llama-3.1-8b", {"dtype": "torch.float16"}, "fp16"),
        ("llama-3.1-8b", {"dtype": "torch.bfloat16"}, "bf16"),
        ("llama-3.1-8b", {"quantization": "fp8"}, "fp8"),  # quantised when it was loaded
        ("deepseek-v3", {"quantization": "fp8", "tp": 8}, "fp8_block"),  # as the checkpoint is
        ("deepseek-v3", {"quantization": None, "tp": 16}, "bf16"),
    ],
)
def test_weights_are_in_the_format_that_ran(tmp_path: Path, model: str, engine: dict[str, Any], weights: str) -> None:
    path = written(tmp_path / "steps.jsonl", model=model, **engine)
    service, _ = engine_service(read_steps(path), ReplayQuestion(bench=path), None, set())
    assert service.pool.deployment.precision.weights == weights


def test_what_is_forecast_in_another_way_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "steps.jsonl", cudagraph_mode="PIECEWISE", model="qwen3-30b-a3b", gpu="rtx_5090")
    service, assumed = engine_service(read_steps(path), ReplayQuestion(bench=path), None, set())
    assert "were in pieces" in assumed[0] and "leaves no memory for a KV cache" in assumed[1]  # 57 GiB of weights
    assert service.pool.settings.kv_blocks == 50_000  # the engine's own


@pytest.mark.parametrize(
    ("mode", "replays"),
    [  # a decode step of 64, a step of 64 and a prompt of 128
        ("CUDAGraphMode.FULL_AND_PIECEWISE", (True, True)),
        ("FULL_DECODE_ONLY", (True, False)),
        ("NONE", (False, False)),
    ],
)
def test_graphs_are_those_that_the_engine_captured(tmp_path: Path, mode: str, replays: tuple[bool, bool]) -> None:
    path = written(tmp_path / "steps.jsonl", cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4, 8, 64, 200])
    table = read_steps(path)
    service, _ = engine_service(table, ReplayQuestion(bench=path), None, set())
    ran = as_measured(service.pool, table).deployment.stack
    assert (bool(ran.replays(64, 64, decodes=True)), bool(ran.replays(192, 64, decodes=False))) == replays
    assert ran.graph_tokens == 200


def test_a_step_is_the_one_of_a_simulation(tmp_path: Path, tables: StepTimeTables) -> None:
    service, forecasts = forecast(written(tmp_path / "steps.jsonl"), tables)
    ran = forecasts.stack
    decode, mixed = (
        next(each for each in forecasts.table.steps if each.step_type == kind) for kind in ("decode", "mixed")
    )
    assert step_seconds(forecasts.times, decode) == pytest.approx(forecasts.times.decode(1, 1024) + ran.step_s)
    expected = forecasts.times.mixed(1, 1050, 128, 0.0, 2, prompts=1)
    assert step_seconds(forecasts.times, mixed) == pytest.approx(expected + ran.step_s)
    slow = forecasts.on(replace(ran, step_s=1e-3, sequence_s=1e-5))
    # a step and two sequences: 1 ms and 20 us
    assert step_seconds(slow, mixed) - step_seconds(forecasts.times, mixed) == pytest.approx(1.02e-3 - ran.step_s)
    assert service.pool.settings.kv_tokens > 500_000


def test_steps_as_forecast_have_no_error(tmp_path: Path, tables: StepTimeTables) -> None:
    as_forecast(tmp_path / "steps.jsonl", lambda each: each.predicted_s, tables)
    service, forecasts = forecast(tmp_path / "steps.jsonl", tables)
    found = replay_steps(service, forecasts)
    assert all(abs(each.error) < 1e-9 and each.inside for each in found.steps)
    groups = found.groups
    assert [(name, errors.steps) for name, errors in groups.items()] == [
        ("decode", 7), ("mixed", 12), ("prompts alone", 3), ("all", 22)
    ]  # fmt: skip
    assert groups["all"].inside == 1.0 and groups["all"].mean == pytest.approx(0.0, abs=1e-9)
    assert found.memory_bytes["weights"][0] == 16_060_000_000
    assert found.memory_bytes["weights"][1] == pytest.approx(16.06e9, rel=0.01)
    assert found.memory_bytes["stack"][0] == 600_000_000  # the context; there is no figure of graphs


def test_the_host_is_scored_where_the_gpu_waits_for_it(tmp_path: Path, tables: StepTimeTables) -> None:
    as_forecast(tmp_path / "eager.jsonl", lambda each: each.predicted_s, tables, cudagraph_mode="NONE")
    service, forecasts = forecast(tmp_path / "eager.jsonl", tables)
    found = replay_steps(service, forecasts)
    first = found.steps[0]  # one sequence, launched kernel by kernel: longer than its kernels
    assert not first.graph and first.host_s == pytest.approx(first.predicted_s)
    decode = found.groups["decode"]
    assert decode.large_hosts >= 1 and decode.host == pytest.approx(0.0, abs=1e-6)
    as_forecast(tmp_path / "graphs.jsonl", lambda each: each.predicted_s, tables)
    service, forecasts = forecast(tmp_path / "graphs.jsonl", tables)
    assert replay_steps(service, forecasts).groups["decode"].large_hosts == 0  # hidden


def test_a_factor_is_fitted_back(tmp_path: Path, tables: StepTimeTables) -> None:
    as_forecast(tmp_path / "steps.jsonl", lambda each: 1.1 * each.predicted_s, tables)
    service, forecasts = forecast(tmp_path / "steps.jsonl", tables)
    fitted = calibrate_steps(forecasts)
    assert fitted.fitted == ("decode_factor", "prompt_factor")
    assert fitted.stack.decode_factor == pytest.approx(1.1, rel=2e-3)
    assert fitted.stack.prompt_factor == pytest.approx(1.1, rel=2e-3)
    assert fitted.error_before == pytest.approx(0.0953, abs=1e-3)  # ln 1.1
    assert fitted.error < 0.003 and fitted.stack.spread == 0.02 and fitted.host == 1.0
    after = replay_steps(service, forecasts).calibrated(forecasts, fitted.stack, fitted.host)
    assert after.groups["prompts alone"].mean < 0.005  # which were not fitted


def test_host_times_of_steps_are_fitted_back(tmp_path: Path, tables: StepTimeTables) -> None:
    slow = {"step_s": 2e-3, "sequence_s": 3e-5}
    as_forecast(tmp_path / "steps.jsonl", lambda each: each.predicted_s, tables, stack=slow, release="0.14.0")
    _, forecasts = forecast(tmp_path / "steps.jsonl", tables)
    fitted = calibrate_steps(forecasts)
    assert {"step_s", "sequence_s"} <= set(fitted.fitted) and fitted.error < 0.01 < fitted.error_before
    assert fitted.stack.step_s == pytest.approx(2e-3, rel=0.1)
    assert fitted.stack.sequence_s == pytest.approx(3e-5, rel=0.1)


def test_a_slow_host_is_fitted_back(tmp_path: Path, tables: StepTimeTables) -> None:
    as_forecast(tmp_path / "steps.jsonl", lambda each: each.predicted_s, tables, host=1.8, cudagraph_mode="NONE",
                release="0.14.0")  # fmt: skip
    _, forecasts = forecast(tmp_path / "steps.jsonl", tables)
    fitted = calibrate_steps(forecasts)
    assert "host_factor" in fitted.fitted and fitted.host == pytest.approx(1.8, rel=0.05)
    assert fitted.error < 0.02 < fitted.error_before
    server = tmp_path / "server.json"
    write_overheads(server, fitted.stack, {"gpu": kc.gpu("h200_sxm").label}, fitted.host)
    _, read_back = forecast(tmp_path / "steps.jsonl", server=server)
    expected = forecasts.compared(fitted.stack, fitted.host)
    for each, other in zip(read_back.compared(read_back.stack), expected, strict=True):
        assert each.predicted_s == pytest.approx(other.predicted_s, rel=1e-6)
        assert each.low_s == pytest.approx(other.low_s) and each.host_s == pytest.approx(other.host_s)


def test_many_mixed_steps_do_not_outvote_those_that_decode(tmp_path: Path, tables: StepTimeTables) -> None:
    records = [each for each in STEPS for _ in range(8 if each["kind"] == "mixed" else 1)]
    as_forecast(
        tmp_path / "steps.jsonl", lambda each: (1.2 if each.step.prompts else 1.03) * each.predicted_s, tables,
        records=records,
    )  # fmt: skip
    service, forecasts = forecast(tmp_path / "steps.jsonl", tables)
    fitted = calibrate_steps(forecasts)
    before = replay_steps(service, forecasts)
    after = before.calibrated(forecasts, fitted.stack, fitted.host)
    assert after.groups["mixed"].mean < 0.5 * before.groups["mixed"].mean
    assert after.groups["decode"].mean <= before.groups["decode"].mean + 1e-9  # 7 steps, and 96 with a prompt


def test_what_fits_is_kept(tmp_path: Path, tables: StepTimeTables) -> None:
    noise = {each: 1 + 0.03 * (-1) ** at for at, each in enumerate(range(len(STEPS)))}
    rows = iter(noise.values())
    as_forecast(tmp_path / "steps.jsonl", lambda each: next(rows) * each.predicted_s, tables)
    _, forecasts = forecast(tmp_path / "steps.jsonl", tables)
    fitted = calibrate_steps(forecasts)
    assert fitted.error <= fitted.error_before
    assert fitted.fitted == () and replace(fitted.stack, spread=0.0) == forecasts.stack
    assert fitted.stack.spread == pytest.approx(0.03, abs=2e-3)  # what they are off by


def test_a_server_file_has_what_was_fitted(tmp_path: Path) -> None:
    usual = stack("vllm")
    fitted = replace(usual.with_host(1.5), decode_factor=1.2, step_s=1e-4, spread=0.03)
    write_overheads(tmp_path / "server.json", fitted, {"gpu": "h200_sxm"}, 1.5)
    assert read_overheads(tmp_path / "server.json", usual, {"h200_sxm"}) == fitted
    other = read_overheads(tmp_path / "server.json", usual, {"a100_sxm"})  # its host, not its kernels
    assert other == replace(fitted, decode_factor=1.0, spread=0.0) and other.launch_s == 1.5 * usual.launch_s


def test_a_synchronous_server_read_back_waits_once(tmp_path: Path) -> None:
    service, _ = forecast(written(tmp_path / "steps.jsonl", async_scheduling=False))
    ran = service.pool.deployment.stack
    assert ran.step_s == pytest.approx(stack("vllm").step_s + stack("vllm").overlapped_step_s)
    write_overheads(tmp_path / "server.json", ran, {"gpu": "h200_sxm"})
    again = read_overheads(tmp_path / "server.json", stack("vllm"), {"h200_sxm"})
    pool = EnginePool(replace(service.pool.deployment, stack=again), service.pool.settings)
    assert pool.deployment.stack.step_s == ran.step_s  # and not the overlapped time a second time


def test_kernels_of_a_step_are_beside_their_forecast(tmp_path: Path) -> None:
    _, forecasts = forecast(written(tmp_path / "steps.jsonl"))
    (found,) = step_kernels(forecasts.table.profiled, forecasts.pool.deployment, kc.Conditions())
    assert found.measured_s == {  # a third each: three steps were profiled
        "gemm": pytest.approx(1e-3), "attention": pytest.approx(2e-4), "elementwise": pytest.approx(3e-5)
    }  # fmt: skip
    assert (found.kernels, found.launches) == (8.0, 1.0)
    assert {"gemm", "attention", "elementwise", "sampling"} <= set(found.predicted_s)
    assert found.predicted_s["gemm"] == max(found.predicted_s.values())
    assert "collectives" not in found.parts


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNN", "gemm"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<...>", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "gemm"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "attention"),
        ("fused_moe_kernel", "moe"),
        ("void vllm::moe::topkGatingSoftmax<8, 128>", "moe"),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<...>>>",
            "moe",
        ),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "elementwise"),
        ("triton_poi_fused__to_copy_clamp_cutlass_scaled_mm_mul_reciprocal_silu_slice_2", "elementwise"),
        ("triton_red_fused_fused_add_rms_norm_moe_forward_0", "elementwise"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16>", "elementwise"),
        ("void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided", "elementwise"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collectives"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "collectives"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float>", "sampling"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
            "sampling",
        ),
        ("_compute_slot_mapping_kernel", "other"),
    ],
)
def test_kernels_of_engines_by_their_names(name: str, part: str) -> None:
    assert engine_part(name) == part and runs_on_gpu(name)


def test_calls_of_the_runtime_are_no_kernels() -> None:
    assert [runs_on_gpu(name) for name in ("cudaLaunchKernel", "cuLaunchKernelEx", "Memcpy HtoD", "cutlass_gemm")] == [
        False, False, True, True
    ]  # fmt: skip
    assert [is_launch(name) for name in ("cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "gemm")] == [
        True, True, False, False
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "line 1 is not JSON"),
        (["[1]"], "line 1 is not a step"),
        (['{"kind": "other"}'], "has no steps of an engine"),
        (["ENGINE", "torn {"], "line 2 is not JSON"),
        (["ENGINE"], "has no step: the run ended before"),
        (["ENGINE", step("quick", 1, 1)], "unknown kind 'quick' of a step; known: decode"),
        (["ENGINE", step("decode", 1, 1, step_us=-1.0)], "line 2: step_us is a number of 0 or more, not -1.0"),
        (["ENGINE", step("decode", 1, 1, step_us=float("nan"))], "step_us is a number"),
        (["ENGINE", step("decode", 1, "x")], "context is a number"),  # type: ignore[arg-type]
        (["ENGINE", step("decode", 0, 0)], "this has neither"),
        (["ENGINE", step("decode", 1.5, 0)], "decodes is a whole number"),  # type: ignore[arg-type]
        (["ENGINE", step("alone", 0, 0, 0, 1)], "1 prompts do not have 0 prompt_tokens"),
        (["ENGINE", STEPS[0], {**PROFILED, "kernels": {"gemm": 3}}], "line 3: kernels are names with a count"),
        ([{"release": None}, STEPS[0]], "does not say its release"),
        ([{"engine": "orca"}, STEPS[0]], "steps of the engine 'orca'; known: vllm"),
    ],
)
def test_files_that_are_not_as_they_are_written(tmp_path: Path, lines: list[Any], said: str) -> None:
    path = tmp_path / "steps.jsonl"
    engine = json.loads(written(path).read_text().splitlines()[0])
    texts = []
    for at, line in enumerate(lines):
        if line == "ENGINE" or (at == 0 and isinstance(line, dict)):
            line = {**engine, **(line if isinstance(line, dict) else {})}
        texts.append(line if isinstance(line, str) else json.dumps(line))
    path.write_text("\n".join(texts) + "\n")
    with pytest.raises(KernelcastError, match=said.replace("(", r"\(")) as error:
        read_steps(path)
    assert "\n" not in str(error.value)


def test_an_unfinished_run_is_not_replayed(tmp_path: Path) -> None:
    with pytest.raises(KernelcastError, match=r"was interrupted.*-o steps.jsonl. goes on"):
        read_steps(written(tmp_path / "steps.progress.jsonl"))


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"model": "/tmp/my-model"}, "calls its model '/tmp/my-model', which is not known: give `model`"),
        ({"release": "main"}, "'main', is no number"),
        ({"release": "0.1.0"}, "unknown release of vLLM"),
        ({"gpu": "h999"}, "unknown gpu 'h999'"),
        ({"quantization": "awq"}, "weights of 'awq', which the config of llama-3.1-8b does not say"),
        ({"kv_cache_dtype": "int4"}, "a KV cache in 'int4' is not known"),
    ],
)
def test_engines_that_are_not_known(tmp_path: Path, engine: dict[str, Any], said: str) -> None:
    path = written(tmp_path / "steps.jsonl", **engine)
    with pytest.raises(KernelcastError, match=said):
        engine_service(read_steps(path), ReplayQuestion(bench=path), None, set())


# ---- the commands ----
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def slower(tmp_path: Path, tables: StepTimeTables) -> Path:
    """Steps a tenth longer than forecast."""
    return as_forecast(tmp_path / "steps.jsonl", lambda each: 1.1 * each.predicted_s, tables).path


def test_steps_as_text(run: Run, slower: Path) -> None:
    code, out, err = run("replay", slower)
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    assert "steps.jsonl: 22 steps of vllm 0.22.1, CUDA graphs FULL_AND_PIECEWISE" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("64 x 1,050 + 128"))
    assert "-9.1%" in row and "yes" in row  # 1 / 1.1; a graph of 192 tokens
    assert "prompts alone" in out and "KV cache, tokens" in out and "8 kernels by 1 launches" in out


def test_steps_as_data(run: Run, slower: Path, tmp_path: Path) -> None:
    found = json.loads(run("replay", slower, "--json", "--plot", tmp_path / "steps.png")[1])
    assert (found["model"], found["gpu"], found["engine"]["release"]) == ("llama-3.1-8b", "NVIDIA H200", "0.22.1")
    assert found["errors"]["all"]["mean"] == pytest.approx(1 - 1 / 1.1) and found["errors"]["mixed"]["steps"] == 12
    assert found["kv_cache"]["measured_tokens"] == 800_000
    assert found["kv_cache"]["error"] == pytest.approx(found["kv_cache"]["predicted_tokens"] / 800_000 - 1)
    first = found["steps"][0]
    assert first["measured_s"] == pytest.approx(1.1 * first["predicted_s"]) and first["graph"] is True
    assert found["kernels"][0]["parts"]["gemm"]["measured_s"] == pytest.approx(1e-3)
    assert (tmp_path / "steps.png").stat().st_size > 0


def test_what_steps_teach_goes_into_simulate_and_replay(run: Run, slower: Path, tmp_path: Path) -> None:
    server = tmp_path / "server.json"
    code, out, err = run("replay", slower, "--calibrate", "-o", server)
    assert (code, err) == (0, "") and "calibrated on 19 steps: 9.5% off before" in out and "x 1.100" in out
    assert max(map(len, out.splitlines())) <= 100
    about = json.loads(server.read_text())["about"]
    assert (about["on"], about["steps_file"], about["release"]) == ("steps", "steps.jsonl", "0.22.1")
    after = json.loads(run("replay", slower, "--server", server, "--json")[1])
    assert after["errors"]["all"]["mean"] < 0.01 and after["errors"]["all"]["inside"] == 1.0
    load = ("simulate", "llama-3.1-8b", "--gpu", "h200_sxm", "--max-concurrency", "1", "--num-prompts", "4", "--json")
    usual, slow = (json.loads(run(*load, *more)[1]) for more in ((), ("--server", server)))
    assert slow["mean_tpot_ms"] == pytest.approx(1.1 * usual["mean_tpot_ms"], rel=3e-3)  # one at a time: no queue


def test_steps_calibrate_a_gpu(run: Run, slower: Path, tmp_path: Path) -> None:
    runs = read_input(slower)
    assert (runs.content, len(runs.records)) == ("runs", 10) and "12 steps that mix" in runs.left_out[0]
    decode, prompt = runs.records[2], runs.records[-2]
    assert decode.parameters["batch"] == 64 and decode.parameters["input_len"] == 1024
    assert decode.parameters["stack"] == "vllm==0.22.1"
    assert (prompt.parameters["batch"], prompt.parameters["input_len"]) == (4, 512)
    code, _, err = run("calibrate", slower, "-o", tmp_path / "c.safetensors")
    assert code == 0 and "10 measured runs" in err
    after = json.loads(run("replay", slower, "--calibration", tmp_path / "c.safetensors", "--json")[1])
    assert after["errors"]["decode"]["mean"] < 0.04 and after["errors"]["all"]["mean"] < 0.05


def test_steps_without_graphs_do_not_calibrate_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(KernelcastError, match="ran without CUDA graphs"):
        read_input(written(tmp_path / "steps.jsonl", cudagraph_mode="NONE"))


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("steps.jsonl", ("--calibrate-on", "10"), "leave out --calibrate-on"),
        ("steps.jsonl", ("-o", "x.json"), "give --calibrate too"),
        ("steps.jsonl", ("--replicas", "2"), "leave out --replicas"),
        ("steps.jsonl", ("--model", "lama"), "unknown model 'lama'"),
        ("steps.progress.jsonl", (), "is of a run that was interrupted"),
        ("torn.jsonl", (), "line 3 is not JSON"),
        ("strange.jsonl", (), "steps of the engine 'orca'; known: vllm"),
        ("empty.jsonl", (), "is not JSON: it is empty"),
    ],
)
def test_refusals_are_one_line(run: Run, tmp_path: Path, name: str, arguments: tuple[str, ...], said: str) -> None:
    path = written(tmp_path / name, engine="orca" if name == "strange.jsonl" else "vllm")
    text = path.read_text()
    if name == "torn.jsonl":
        path.write_text(text[: text.index("\n", text.index("\n") + 1) + 20])
    elif name == "empty.jsonl":
        path.write_text("")
    code, out, err = run("replay", path, *arguments)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", LIVE, ids=lambda path: path.stem)
def test_steps_of_live_engines(path: Path, tables: StepTimeTables) -> None:
    """Sane: no step is twice or half as long as forecast, and what is fitted serves those left out no worse."""
    service, forecasts = forecast(path, tables)
    found = replay_steps(service, forecasts)
    for name, errors in found.groups.items():
        assert errors.median < 0.25 and errors.worst < 1.0, name
    tokens = found.table.kv_tokens
    assert tokens and abs(service.pool.settings.kv_tokens / tokens - 1) < 0.15
    fitted = calibrate_steps(forecasts)
    after = found.calibrated(forecasts, fitted.stack, fitted.host)
    assert fitted.error <= fitted.error_before
    for name in ("decode", "mixed"):
        assert after.groups[name].mean <= found.groups[name].mean + 0.01
