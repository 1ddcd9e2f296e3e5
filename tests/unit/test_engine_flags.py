"""Engines' names of parameters and formats: on the command line, in Python and in sweep files they mean what they mean
in the engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kernelcast as kc
from kernelcast.app.questions.compare import CompareQuestion
from kernelcast.app.questions.infer import InferQuestion
from kernelcast.app.questions.parameters import command_parameters
from kernelcast.app.questions.plan import PlanQuestion
from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.ops.dtypes import canonical_dtype
from kernelcast.search.sweep.file import sweep_of
from kernelcast.stacks import stack
from kernelcast.stacks.engine_flags import ALIASES, NEGATIONS, WITHOUT_EFFECT

Run = Callable[..., tuple[int, str, str]]
INFER = shlex.split("infer llama-3.2-1b --gpu h100_sxm --input-len 64 --output-len 8 --json")
SIMULATE = shlex.split("simulate llama-3.2-1b --gpu h100_sxm --request-rate 8 --num-prompts 20 --no-intervals --json")


def told(run: Run, *arguments: str) -> dict[str, Any]:
    code, out, err = run(*arguments)
    assert code == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


def refused(run: Run, line: str, expected: int = 2) -> str:
    code, out, err = run(*shlex.split(line))
    assert (code, out, err.count("\n")) == (expected, "", 1), err
    return err


def test_every_name_is_of_a_parameter_and_of_no_other() -> None:
    questions = (InferQuestion, SimulateQuestion, CompareQuestion, PlanQuestion)
    parameters = [{parameter.name for parameter in command_parameters(question)} for question in questions]
    known = set().union(*parameters)
    assert {*ALIASES, *NEGATIONS} <= known
    for alias in (alias for names in (ALIASES, NEGATIONS) for each in names.values() for alias in each):
        assert alias not in WITHOUT_EFFECT
        for names in parameters:  # one meaning in each command
            homes = [name for name in names if alias in ALIASES.get(name, ())]
            assert alias in names or len(homes) <= 1 or "quantization" in homes or alias in ("quantization", "q")


@pytest.mark.parametrize(
    ("engine", "here"),
    [
        ("--tensor-parallel-size 2", "--tp 2"), ("-tp 2", "--tp 2"), ("--tp_size=2", "--tp 2"),
        ("--pipeline-parallel-size 2", "--pp 2"), ("-pp 2", "--pp 2"), ("--data-parallel-size 2", "--dp 2"),
        ("--kv-cache-dtype fp8_e4m3", "--kv-dtype fp8"), ("--kv_cache_dtype auto", ""),
        ("--dtype bfloat16", "--dtype bf16"), ("--dtype half", "--dtype fp16"), ("--dtype auto", ""),
        ("--quantization fp8", "--dtype fp8"), ("-q awq", "--dtype int4"), ("--dtype bfloat16 -q gptq", "--dtype int4"),
        ("--max-num-batched-tokens 32", "--chunk 32"), ("--chunked-prefill-size 32", "--chunk 32"),
        ("--chunked-prefill-size -1", "--chunk 0"), ("--max_num_tokens 32", "--chunk 32"),
        ("--max-num-seqs 8", ""), ("--max-model-len 4096", ""), ("--context-length 4096", ""),
        ("--mem-fraction-static 0.8", "--gpu-memory-utilization 0.8"), ("--disable-cuda-graph", "--enforce-eager"),
        ("--trust-remote-code --port 8000 --served-model-name x --load-format dummy --no-enable-log-requests", ""),
    ],
)  # fmt: skip
def test_infer_takes_engines_flags(run: Run, engine: str, here: str) -> None:
    assert told(run, *INFER, *engine.split()) == told(run, *INFER, *here.split())


def test_python_takes_engines_names() -> None:
    usual: dict[str, Any] = {"input_len": 64, "output_len": 8}
    by_name = kc.infer("llama-3.2-1b", "h100_sxm", tensor_parallel_size=2, kv_cache_dtype="fp8_e5m2",
                       quantization="FP8", random_input_len=64, output_len=8)  # fmt: skip
    assert by_name.total == kc.infer("llama-3.2-1b", "h100_sxm", tp=2, kv_dtype="fp8", dtype="fp8", **usual).total
    with pytest.raises(kc.KernelcastError, match="tp and tp_size are the same: give one of them"):
        kc.infer("llama-3.2-1b", "h100_sxm", tp=2, tp_size=2)
    served = kc.simulate("llama-3.2-1b", "h100_sxm", request_rate=8, num_prompts=20, disable_radix_cache=True)
    assert served.service.pool.settings.prefix_caching is False


def test_other_commands_and_sweep_files_take_them(run: Run) -> None:
    compare = shlex.split("compare llama-3.2-1b --gpus h100_sxm --batch 2 --json")
    engine = told(run, *compare, "--kv-cache-dtype", "fp8_e4m3", "--quantization", "FP8")
    assert engine == told(run, *compare, "--kv-dtype", "fp8", "--formats", "fp8")
    question = PlanQuestion(model="llama-3.2-1b", dtype="bfloat16,FP8", tp=[1, 2], ttft_p99=500)  # type: ignore[arg-type]
    assert (question.dtype, question.tp, question.ttft_p99) == ("bf16,fp8", "1,2", "500")
    swept = sweep_of({"model": "llama-3.2-1b", "gpu": "l40s", "tensor_parallel_size": [1, 2], "dtype": ["auto", "half"],
                      "kv_cache_dtype": "fp8_e4m3", "random_input_len": 64})  # fmt: skip
    assert (swept.dtypes, swept.kv_dtypes, len(swept.layouts[0])) == (("own", "fp16"), ("fp8",), 2)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("torch.bfloat16", "bf16"), ("BFloat16", "bf16"), ("float16", "fp16"), ("half", "fp16"), ("float", "fp32"),
        ("FP8", "fp8"), ("fp8_e4m3", "fp8"), ("float8_e4m3fn", "fp8"), ("torch.float8_e5m2", "fp8"), ("awq", "int4"),
        ("gptq_marlin", "int4"), ("w4a16", "int4"), ("W8A8", "int8"), ("NVFP4", "nvfp4"), ("modelopt_fp4", "nvfp4"),
        ("bf17", "bf17"),
    ],
)  # fmt: skip
def test_formats_as_people_write_them(spelling: str, name: str) -> None:
    assert canonical_dtype(spelling) == name
    if name != "bf17":
        assert kc.Gemm(m=1, n=64, k=64, dtype=spelling).dtype == name


def test_quantization_is_that_of_the_checkpoint_or_refused(run: Run) -> None:
    assert told(run, *INFER, "--quantization", "fp8")["precision"] == "fp8"
    nvfp4 = ["infer", "llama-3.3-70b-nvfp4", "--gpu", "b200_sxm", "--json"]
    assert told(run, *nvfp4, "-q", "modelopt") == told(run, *nvfp4)
    line = "infer llama-3.3-70b-nvfp4 --gpu b200_sxm -q awq"
    assert "stored in nvfp4, which --quantization awq does not match" in refused(run, line)
    assert "say which format" in refused(run, "infer llama-3.2-1b --gpu h100_sxm -q compressed-tensors")
    assert "unknown quantization 'gguf'" in refused(run, "infer llama-3.2-1b --gpu h100_sxm -q gguf")
    assert "are two formats" in refused(run, "infer llama-3.2-1b --gpu h100_sxm --dtype fp8 -q awq")


def test_a_16_bit_dtype_of_a_quantized_checkpoint_is_of_activations(run: Run) -> None:
    line = ["infer", "llama-3.1-8b-fp8", "--gpu", "h100_sxm", "--json"]
    code, out, err = run(*line, "--dtype", "bfloat16")
    assert code == 0 and "is stored in fp8: --dtype bf16 is of activations, as in engines" in err
    assert json.loads(out)["memory_bytes"] == told(run, *line)["memory_bytes"]


def test_a_gpu_without_bf16_runs_fp16_as_engines_fall_back_to(run: Run) -> None:
    line = ("infer", "Qwen/Qwen2.5-7B-Instruct-AWQ", "--gpu", "t4", "--json")
    code, out, err = run(*line)
    assert code == 0 and "t4 has no bf16 arithmetic: forecast in fp16" in err
    assert json.loads(out) == json.loads(run(*line, "--dtype", "half")[1])
    refusal = run(*line, "--dtype", "bfloat16")[2]
    assert "t4 has no bf16 matrix arithmetic" in refusal and "give --dtype fp16" in refusal
    asked = told(run, "infer", "qwen2.5-1.5b", "--gpu", "v100", "--quantization", "awq", "--dtype", "half", "--json")
    assert asked["precision"] == "int4"
    assert told(run, "infer", "gpt-oss-20b", "--gpu", "v100", "--json")["precision"] == "fp16, experts mxfp4"
    rows = told(run, "compare", "Qwen/Qwen2.5-7B-Instruct-AWQ", "--gpus", "t4", "--batch", "2", "--json")["rows"]
    assert rows[0]["fits"]


def test_fp8_that_a_gpu_does_not_multiply_is_of_weights_alone(run: Run) -> None:
    line = ["infer", "llama-3.1-8b", "--gpu", "a100", "--json"]
    both = told(run, *line, "--quantization", "fp8"), told(run, *line, "--dtype", "int8_wo")
    assert both[0]["tpot_s"] == pytest.approx(both[1]["tpot_s"], rel=0.01)
    assert "with --quantization fp8 weights alone are fp8" in refused(run, "infer llama-3.1-8b --gpu a100 --dtype fp8")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("TensorRT-LLM", "trtllm"), ("trt-llm", "trtllm"), ("tensorrt_llm", "trtllm"), ("vLLM", "vllm"),
     ("SGLang", "sglang"), ("PyTorch", "torch"), ("vLLM 0.11", "vllm==0.11"), ("vllm:v0.11", "vllm==0.11")],
)  # fmt: skip
def test_engines_as_people_write_them(spelling: str, name: str, run: Run) -> None:
    line = ["infer", "llama-3.2-1b", "--gpu", "h100_sxm", "--json"]
    assert told(run, *line, "--backend", spelling) == told(run, *line, "--stack", name)


def test_benchmarks_names_of_batch_and_rate(run: Run) -> None:
    line = ["infer", "llama-3.2-1b", "--gpu", "h100_sxm", "--json"]
    assert told(run, *line, "--batch-size", "4") == told(run, *line, "--concurrency", "4")
    load = ["simulate", "llama-3.2-1b", "--gpu", "h100_sxm", "--num-prompts", "20", "--no-intervals", "--json"]
    assert told(run, *load, "--qps", "8") == told(run, *load, "--request-rate", "8")


# ---- what an engine is started with ----
def test_eager_steps_are_launched_op_by_op() -> None:
    """Llama 3.2 1B has 16 layers of some twelve launches, 65 us each: about 13 ms, many times what its kernels take."""
    graphs, eager = (kc.infer("llama-3.2-1b", "h100_sxm", enforce_eager=each) for each in (False, True))
    assert graphs.tpot.value < 2.5e-3 and 10e-3 < eager.tpot.value < 16e-3
    assert stack("torch").eager().launch_s == stack("torch").launch_s


def test_max_model_len_bounds_requests_and_needs_its_cache(run: Run) -> None:
    line = "infer llama-3.1-8b --gpu rtx_5090 --max-model-len"
    assert "have 1,152 tokens together, more than --max-model-len 1,000" in refused(run, f"{line} 1000")
    assert "more than the 131,072 tokens that llama-3.1-8b takes" in refused(run, f"{line} 200000")
    said = refused(run, f"{line} 131072")
    assert "less than one request of --max-model-len 131,072, and vLLM does not start" in said
    kv_tokens = int(said.partition("KV cache of ")[2].partition(" ")[0].replace(",", ""))
    # 0.92 of 31.4 GiB less 15.0 of weights, 0.5 of logits and activations and 1.1 of its own, 128 KiB a token
    assert kv_tokens == pytest.approx((0.92 * 31.4 - 14.96 - 0.4 - 1.1) * 2**13, rel=0.02)
    assert run(*line.split(), str(kv_tokens // 16 * 16))[0] == 0
    assert run(*line.split(), "131072", "--stack", "sglang")[0] == 0  # which starts all the same
    simulate = "simulate llama-3.1-8b --gpu rtx_5090 --request-rate 2 --num-prompts 5"
    assert "and vLLM does not start" in refused(run, f"{simulate} --max-model-len 131072")
    assert "1152 tokens together, and --max-model-len is 1000" in refused(run, f"{simulate} --max-model-len 1000")


def test_expert_parallel_as_vllm_and_dp_attention_as_sglang_and_tensorrt_have_it() -> None:
    def layout(**given: Any) -> tuple[int, int, int]:
        found = kc.infer("qwen3-30b-a3b", "h100_sxm", batch=8, output_len=2, **given).deployment.layout
        return found.tp, found.dp, found.ep

    assert layout(tp=2, dp=2, enable_expert_parallel=True) == (2, 2, 4)
    assert layout(stack="sglang", tp_size=4, dp_size=2, enable_dp_attention=True, ep_size=4) == (2, 2, 4)
    assert layout(stack="trtllm", tp_size=4, ep_size=4, enable_attention_dp=True) == (1, 4, 4)
    assert layout(dp_size=2) == (1, 2, 1)
    backend = {"dp": 4, "enable_expert_parallel": True, "batch": 8, "output_len": 2}
    found = kc.infer("qwen3-30b-a3b", "h100_sxm", all2all_backend="deepep_low_latency", **backend)  # type: ignore[call-overload]
    assert found.deployment.stack.exchange == "deepep"
    with pytest.raises(kc.KernelcastError, match="leave out ep=2"):
        layout(tp=4, ep=2, enable_expert_parallel=True)
    with pytest.raises(kc.KernelcastError, match=r"llama-3\.2-1b has no experts"):
        kc.infer("llama-3.2-1b", "h100_sxm", enable_expert_parallel=True)
    with pytest.raises(kc.KernelcastError, match="engines beside one another"):
        layout(stack="sglang", dp_size=2)
    load: dict[str, Any] = {"request_rate": 8, "num_prompts": 10, "intervals": False}
    served = kc.simulate("llama-3.2-1b", "h100_sxm", stack="sglang", dp_size=2, **load)
    assert (served.service.pool.replicas, served.service.gpus) == (2, 2)


def test_limits_of_all_ranks_are_shared_out_as_in_sglang() -> None:
    served = kc.simulate("qwen3-30b-a3b", "h200_sxm", stack="sglang", tp_size=4, dp_size=4, enable_dp_attention=True,
                         max_running_requests=64, chunked_prefill_size=8192, request_rate=4, num_prompts=10,
                         intervals=False)  # fmt: skip
    settings = served.service.pool.settings
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (16, 2048)
    batch: dict[str, Any] = {"stack": "sglang", "tp_size": 4, "dp_size": 4, "enable_dp_attention": True, "batch": 64,
                             "output_len": 2}  # fmt: skip
    total = kc.infer("qwen3-30b-a3b", "h200_sxm", chunked_prefill_size=8192, max_running_requests=64, **batch).total
    assert total == kc.infer("qwen3-30b-a3b", "h200_sxm", chunk=8192, **batch).total
    with pytest.raises(kc.KernelcastError, match="max_num_seqs=63 does not run 64 sequences at once"):
        kc.infer("qwen3-30b-a3b", "h200_sxm", max_running_requests=63, **batch)


def test_a_batch_that_the_engine_would_not_run_as_one_is_refused(run: Run) -> None:
    line = "infer llama-3.2-1b --gpu h100_sxm --batch 16"
    assert "--max-num-seqs 8 does not run 16 sequences at once" in refused(run, f"{line} --max-num-seqs 8")
    line = "infer llama-3.1-8b --gpu h100_sxm --batch 64 --input-len 4096"  # 33 GiB of KV cache
    assert run(*shlex.split(line))[0] == 0
    assert "needs" in refused(run, f"{line} --gpu-memory-utilization 0.5", 3)
    said = refused(run, f"{line} --stack sglang --mem-fraction-static 0.5", 3)
    assert "GiB of KV cache a GPU, and --gpu-memory-utilization 0.5 leaves SGLang" in said
    assert "must lie in (0, 1]" in refused(run, f"{line} --gpu-memory-utilization 1.5")


# ---- benchmarks ----
def test_goodput_takes_several_goals_as_vllm_does(run: Run) -> None:
    one = told(run, *SIMULATE, "--goodput", "ttft:500", "tpot:30", "--seed", "0")
    assert one["request_goodput"] > 0
    assert one == told(run, *SIMULATE, "--goodput", "ttft:500", "--goodput", "tpot:30")


def test_datasets_are_those_of_the_benchmarks(run: Run) -> None:
    random = told(run, *SIMULATE, "--dataset-name", "random", "--random-input-len", "64", "--ignore-eos")
    assert random == told(run, *SIMULATE, "--input-len", "64")
    repeated = told(run, *SIMULATE, "--dataset-name", "prefix_repetition")
    assert repeated == told(run, *SIMULATE, "--prefix-repetition-num-prefixes", "10", "--prefix-len", "256")
    line = "simulate llama-3.2-1b --gpu h100_sxm --request-rate 8 --dataset-name"
    assert "give their lengths with --trace" in refused(run, f"{line} sharegpt")
    assert "leave out --num-groups" in refused(run, f"{line} random --num-groups 2")


def test_what_changes_nothing_is_said(run: Run) -> None:
    code, _, err = run(*INFER, "--trust-remote-code", "--host", "0.0.0.0")
    assert code == 0
    assert err.splitlines() == [f"kernelcast: {name} changes nothing in the forecast"
                                for name in ("--trust-remote-code", "--host")]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("infer llama-3.2-1b --gpu h100_sxm --gpu h200_sxm", "--gpu is given twice: give it once"),
        ("infer llama-3.2-1b --gpu h100_sxm --tp 2 --tensor-parallel-size 4", "--tp is given twice"),
        ("compare llama-3.2-1b --gpus h100_sxm --gpu l40s", "--gpus is given twice: give it once, with commas"),
        ("infer llama-3.2-1b --gpu mi300x --stack trtllm", "TensorRT-LLM runs on NVIDIA GPUs alone"),
        ("simulate llama-3.2-1b --gpu mi300x --stack trtllm --request-rate 2", "take --stack vllm or sglang"),
        ("infer llama-3.2-1b --gpu l40s --input-len 8k", "--input-len must be a whole number, in digits alone"),
        ("infer llama-3.2-1b --gpu l40s --request-rate 2", "`kernelcast infer --help` lists all"),
        ("infer llama-3.1-8b --gpu l40s --draft-tokens 3 --draft-model EAGLE3-LLaMA3.1-Instruct-8B", "draft heads"),
        ("infer qwen3-30b-a3b --gpu h100 --enable-dp-attention --dp 8 --stack sglang", "give --tp 8, or a multiple"),
    ],
)  # fmt: skip
def test_silent_nonsense_is_refused(run: Run, line: str, said: str) -> None:
    assert said in refused(run, line)


def test_a_list_option_may_be_repeated(run: Run) -> None:
    twice = told(run, *INFER, "--set", "dram_bytes_per_s*2", "--set", "sm_count=120")
    assert set(twice["gpu"]) and twice["total_s"] != told(run, *INFER)["total_s"]


def test_a_gpu_that_an_engine_does_not_run_on_is_a_row_that_says_so(run: Run) -> None:
    found = told(run, *shlex.split("compare llama-3.2-1b --gpus h100_sxm,mi300x --batch 2 --stack trtllm --json"))
    rows = {row["gpu"]: row for row in found["rows"]}
    assert "does not run on GPUs of AMD" in json.dumps(rows["mi300x"])


def test_files_of_settings_name_what_is_wrong(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text('model = "llama-3.2-1b"\ngpu = "l40s"\ntp = 1\ntensor_parallel_size = 2\n')
    assert "tp and tensor_parallel_size are the same" in refused(run, f"sweep {path}")
