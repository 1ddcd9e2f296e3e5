"""The KV cache budget of each engine: what its share of the memory means, and what a draft model takes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deployments import deployed

from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.errors import KernelcastError
from kernelcast.inference.memory import cache_bytes, memory, weight_bytes
from kernelcast.serving.service import engine_settings, logged_tokens
from kernelcast.stacks import stack

# A token of Llama-3.1-8B in bf16: keys and values x 8 heads x 128 x 32 layers x 2 bytes; of Llama-3.2-1B: 8 heads x 64
# x 16 layers.
TOKEN_BYTES, DRAFT_TOKEN_BYTES = 2 * 8 * 128 * 32 * 2, 2 * 8 * 64 * 16 * 2
GIVEN = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}


def activation_bytes(engine: str) -> float:
    return float(memory(deployed(engine=stack(engine)), {}, 8192, 256)["activation"])


@pytest.mark.parametrize("share", [0.9, 0.45])
def test_vllm_fills_a_share_of_the_memory_with_all_that_it_has(share: float) -> None:
    place = deployed(engine=stack("vllm").with_memory_share(share))
    room = (
        share * place.gpu.allocatable_bytes
        - weight_bytes(place)
        - activation_bytes("vllm")
        - place.stack.reserved_bytes
    )
    assert engine_settings(place, GIVEN).kv_blocks == room // (16 * TOKEN_BYTES) > 0


@pytest.mark.parametrize("share", [0.88, 0.5])
def test_sglangs_share_holds_weights_and_cache_and_activations_are_beside_it(share: float) -> None:
    place = deployed(engine=stack("sglang").with_memory_share(share))
    room = share * (place.gpu.allocatable_bytes - place.stack.reserved_bytes) - weight_bytes(place)
    for tokens in (2048, 16384):  # whatever a step takes
        found = engine_settings(place, {**GIVEN, "max_num_batched_tokens": tokens})
        assert found.kv_tokens == room // TOKEN_BYTES > 0


def test_sglang_keeps_recurrent_states_in_a_pool_of_their_own_three_for_each_request() -> None:
    """Qwen3.5-9B: 24 layers with matrices of 32 heads x 128 x 128 in fp32, and three inputs of a convolution over 2 x
    16 x 128 + 32 x 128 channels in 16 bits; eight layers with keys and values of 4 heads x 256."""
    place = deployed("qwen3.5-9b", engine=stack("sglang"))
    state_bytes = 24 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    room = 0.88 * (place.gpu.allocatable_bytes - place.stack.reserved_bytes) - weight_bytes(place)
    found = engine_settings(place)
    assert found.max_num_seqs == 0.9 / 1.9 * room // state_bytes // 3
    assert found.kv_tokens == pytest.approx(room / 1.9 / (8 * 2 * 4 * 256 * 2), rel=1e-3)
    assert not found.async_scheduling
    # --disable-radix-cache: one state a request, and steps overlap
    alone = engine_settings(place, {"prefix_caching": False})
    assert alone.max_num_seqs == 0.9 / 1.9 * room // state_bytes and alone.async_scheduling
    assert engine_settings(deployed(engine=stack("sglang"))).async_scheduling  # no states
    assert not engine_settings(deployed(engine=stack("sglang"), pp=2)).async_scheduling  # nor in a pipeline
    assert engine_settings(deployed(engine=stack("vllm"), pp=2)).async_scheduling


def test_tensorrts_share_is_of_what_the_rest_leaves_free() -> None:
    blocks = []
    for share in (0.9, 0.45):
        place = deployed(engine=stack("trtllm").with_memory_share(share))
        used = weight_bytes(place) + activation_bytes("trtllm") + place.stack.reserved_bytes
        blocks.append(engine_settings(place, GIVEN).kv_blocks)
        assert blocks[-1] == share * (place.gpu.allocatable_bytes - used) // (32 * TOKEN_BYTES)
    assert blocks[0] == pytest.approx(2 * blocks[1], abs=1)


def test_a_draft_model_takes_its_weights_and_a_cache_of_every_token() -> None:
    place, draft = deployed(engine=stack("vllm")), deployed("llama-3.2-1b", engine=stack("vllm"))
    share = place.stack.memory_share
    room = (
        share * place.gpu.allocatable_bytes
        - weight_bytes(place)
        - activation_bytes("vllm")
        - place.stack.reserved_bytes
    )
    each = 16 * (TOKEN_BYTES + DRAFT_TOKEN_BYTES)
    assert engine_settings(place, GIVEN, draft=draft).kv_blocks == (room - weight_bytes(draft)) // each
    question = {"model": "llama-3.1-8b", "gpu": "h100_sxm", "num_prompts": 2, "intervals": False}
    pools = [
        SimulateQuestion(**question, **GIVEN, **more).answer().service.pool.settings.kv_blocks  # type: ignore[arg-type]
        for more in ({}, {"draft_tokens": 3}, {"draft_tokens": 3, "draft_model": "llama-3.2-1b"})
    ]
    assert pools[0] == pools[1] == room // (16 * TOKEN_BYTES)
    assert pools[2] == (room - weight_bytes(draft)) // each


# KV-cache tokens as vLLM logged them ("GPU KV cache size: 909,280 tokens", or the GiB of it over the bytes of a token)
H200 = "validation/README.md"
INFERENCE_SIM = "github.com/inference-sim/sim-to-real-accuracy-validation: kv_blocks of 16 tokens"
PLANNER = "github.com/llm-d-incubation/llm-d-planner: accuracy/accuracy_report.md"
BENCHMARKING = "github.com/dennislee22/vLLM-benchmarking: log/"
SMALL_STEPS = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
SORTED = {"logit_bytes": 38.0}  # a machine without FlashInfer: PyTorch sorts the logits
LOGGED = [
    ("llama-3.1-8b", "h200_sxm", 1, "vllm==0.22", {}, 909_280, 0.01, H200),
    ("qwen2.5-14b", "h200_sxm", 1, "vllm==0.22", {}, 534_832, 0.01, H200),
    ("mistral-nemo-12b", "h200_sxm", 1, "vllm==0.22", {}, 675_280, 0.01, H200),
    ("qwen3-30b-a3b", "h200_sxm", 1, "vllm==0.22", {}, 744_672, 0.01, H200),
    ("deepseek-v2-lite", "h200_sxm", 1, "vllm==0.22", {}, 3_322_048, 0.01, H200),
    ("glm-4.7-flash", "h200_sxm", 1, "vllm==0.22", {}, 1_355_760, 0.03, H200),
    ("gpt-oss-20b", "h200_sxm", 1, "vllm==0.22", {}, 3_224_657, 0.01, H200),
    ("llama-3.1-8b", "h200_sxm", 1, "vllm==0.22", {"dtype": "fp8", "cache": "fp8"}, 1_924_928, 0.01, H200),
    ("llama-2-7b", "h100_sxm", 1, "vllm==0.15", SMALL_STEPS, 119_408, 0.02, INFERENCE_SIM),
    ("llama-3.1-70b", "h100_sxm", 4, "vllm==0.15", SMALL_STEPS, 486_800, 0.02, INFERENCE_SIM),
    ("mistral-nemo-12b", "h100_sxm", 2, "vllm==0.15", {"max_num_seqs": 128, "max_num_batched_tokens": 1024}, 768_144,
     0.02, INFERENCE_SIM),
    ("qwen2.5-7b", "h100_sxm", 1, "vllm==0.15", SMALL_STEPS, 1_045_632, 0.02, INFERENCE_SIM),
    ("qwen3-14b", "h100_sxm", 1, "vllm==0.15", {"share": 0.95}, 33.55 * 8192, 0.02, PLANNER),
    ("qwen3-14b", "h100_sxm", 1, "vllm==0.17", {"share": 0.95}, 36.27 * 8192, 0.02, PLANNER),
    ("llama-3.1-8b", "h100_sxm", 1, "vllm==0.19", {"share": 0.95}, 476_016, 0.02, PLANNER),
    ("qwen2.5-7b", "h100_sxm", 1, "vllm==0.19", {"share": 0.95}, 1_096_000, 0.02, PLANNER),
    ("qwen2-7b", "a100_sxm", 1, "vllm==0.10", {"share": 0.5}, 464_848, 0.02, BENCHMARKING),
    ("qwen2-7b", "a100_sxm", 1, "vllm==0.10", {"share": 0.25}, 5.01 * 2**30 / 57_344, 0.02, BENCHMARKING),
    ("qwen2-7b", "a100_sxm_40gb", 2, "vllm==0.10", {"share": 0.5, **SORTED}, 412_944, 0.02, BENCHMARKING),
    ("qwen3-235b-a22b-fp8", "l40s", 8, "vllm==0.10", SORTED, 238_208, 0.03,
     "a log of vLLM 0.10.2 on eight L40S, Qwen3-235B-A22B-Instruct-2507-FP8 with expert parallelism"),
    ("qwen3-235b-a22b-fp8", "rtx_pro_6000_server", 4, "vllm==0.22", {"max_num_seqs": 32, "share": 0.9}, 621_392, 0.08,
     "a log of August 2026 on four RTX PRO 6000 Server, Qwen3-235B-A22B-Instruct-2507-FP8"),
    ("llama-3.1-8b", "rtx_3090", 1, "vllm==0.6", {"max_num_batched_tokens": 20000}, 31_232, 0.08,
     "https://github.com/vllm-project/vllm/issues/10517, steps of 20,000 tokens"),
    ("deepseek-r1-distill-qwen-14b", "rtx_4090", 2, "vllm==0.7", {"share": 0.98}, 94_917, 0.08,
     "https://github.com/vllm-project/vllm/issues/13061: 8.69 GiB of 98,304 bytes a token"),
    ("qwen2.5-0.5b", "rtx_4090", 1, "vllm==0.22", {"max_num_batched_tokens": 8192}, 1_793_232, 0.08,
     "a log of vLLM 0.27.1 on an RTX 4090 under WSL, Qwen2.5-0.5B"),
    ("qwen2.5-0.5b", "l4", 1, "vllm==0.22", {"share": 0.98}, 1_733_440, 0.08,
     "https://github.com/vllm-project/vllm/pull/57926"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gpu", "tp", "engine", "given", "logged", "within", "source"), LOGGED)
def test_as_many_tokens_as_engines_logged(
    name: str, gpu: str, tp: int, engine: str, given: dict[str, Any], logged: float, within: float, source: str
) -> None:
    known = stack(engine)
    limits = dict(given)
    known = known.with_memory_share(limits.pop("share", known.memory_share))
    known = replace(known, logit_bytes=limits.pop("logit_bytes", known.logit_bytes))
    formats = {name: limits.pop(name, None) for name in ("dtype", "cache")}
    place = deployed(name, on=gpu, engine=known, tp=tp, **formats)
    assert logged_tokens(place, engine_settings(place, limits), 16384) == pytest.approx(logged, rel=within)


def test_windows_keep_a_whole_step_of_each_request_that_is_logged_and_their_window_of_those_that_decode() -> None:
    """gpt-oss: half of the layers have a window of 128; vLLM 0.22 logs its KV cache for requests of 16,384 tokens each
    in a step of 8,192."""
    place = deployed("gpt-oss-20b", on="h200_sxm", engine=stack("vllm"))
    layer = 2 * 8 * 64 * 2
    assert cache_bytes(place, 16384) == 12 * layer * (16384 + 128)
    assert cache_bytes(place, 16384, 8192) == 12 * layer * (16384 + 128 + 8192)
    assert cache_bytes(place, 1024, 8192) == 24 * layer * 1024


def test_experts_in_mxfp4_are_padded_to_whole_tiles() -> None:
    """gpt-oss-120b: 36 layers of 128 experts of 3 x 2880 x 2880 weights in 4.25 bits. Marlin takes 2944 columns of
    3072 rows; of four GPUs a part of 720 columns takes 768. Triton pads rows alone. vLLM 0.10 loaded 65.97 GiB on an
    H100 (its issue 23278) and 17.22 on each of four A100 (its logs as above), a later one 64.38 on an H100, and 13.47
    of gpt-oss-20b (github.com/llm-d/llm-d-benchmark, pull request 732)."""
    gib, experts = 2**30, 36 * 128 * 3 * 2880**2 * 4.25 / 8
    triton = weight_bytes(deployed("gpt-oss-120b", on="h100_sxm", engine=stack("vllm")))
    marlin = weight_bytes(deployed("gpt-oss-120b", on="h100_sxm", engine=stack("vllm==0.10")))
    assert marlin - triton == pytest.approx(experts * (2944 - 2880) * 3072 / 2880**2, rel=0.001)
    assert triton / gib == pytest.approx(64.38, rel=0.005) and marlin / gib == pytest.approx(65.97, rel=0.005)
    small = weight_bytes(deployed("gpt-oss-20b", on="h100_sxm", engine=stack("vllm")))
    assert small / gib == pytest.approx(13.47, rel=0.01)
    four = weight_bytes(deployed("gpt-oss-120b", on="a100_sxm", engine=stack("vllm==0.10"), tp=4))
    assert four / gib == pytest.approx(17.22, rel=0.01)


def test_the_experts_of_an_older_vllm_give_their_workspace_back() -> None:
    """gpt-oss-120b on an H100, vLLM 0.10.1 without FlashInfer: 65.97 GiB of weights and -2.14 GiB for the cache, of 0.9
    of the memory (its issue 23278)."""
    sorting = replace(stack("vllm==0.10"), logit_bytes=38.0)
    place = deployed("gpt-oss-120b", on="h100_sxm", engine=sorting)
    held = memory(place, {}, 8192, 1024)
    left = 0.9 * place.gpu.allocatable_bytes - sum(held.parts.values())
    assert left / 2**30 == pytest.approx(-2.14, abs=0.15)
    kept = memory(replace(place, stack=replace(sorting, experts_workspace=True)), {}, 8192, 1024)
    workspace = 8192 * 4 * (2 * 2880 + 2880 + 2880) * 2  # up, gate and their product, and the output, of four experts
    assert kept["activation"] - held["activation"] == workspace


def test_the_error_says_what_leaves_no_memory() -> None:
    place = deployed("llama-3.1-70b", engine=stack("trtllm"))
    with pytest.raises(KernelcastError, match=r"leaves no memory.* fills a share of 0\.9; give more GPUs"):
        engine_settings(place)


@pytest.mark.parametrize(
    "flag", ["--gpu-memory-utilization", "--mem-fraction-static", "--kv-cache-free-gpu-memory-fraction"]
)
def test_every_engines_name_of_the_share_is_a_flag(flag: str) -> None:
    from kernelcast.app.questions.parameters import command_parameters

    named = {parameter.name: parameter for parameter in command_parameters(SimulateQuestion)}["gpu_memory_utilization"]
    assert flag in (*named.flags, *(f"--{alias.replace('_', '-')}" for alias in named.aliases))
