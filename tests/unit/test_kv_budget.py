"""The KV cache budget of each engine: what its share of the memory means, and what a draft model takes of it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployments import deployed

from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.errors import KernelcastError
from kernelcast.inference.memory import cache_bytes, encoder_bytes, memory, weight_bytes
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


LOGS = tomllib.loads((Path(__file__).parents[2] / "validation/vllm_kv_cache.toml").read_text(encoding="utf-8"))["logs"]
FIGURES = {"tokens", "gib", "within", "source", "miss"}
FLAGS = {"share", "logit_bytes", "dtype", "cache", "max_num_seqs", "max_num_batched_tokens", "max_model_len"}


def logs() -> list[Any]:
    def case(log: dict[str, Any]) -> Any:
        marks = [pytest.mark.xfail(strict=True, reason=log["miss"])] if "miss" in log else []
        return pytest.param(
            log, marks=marks, id="-".join(map(str, (log["model"], log.get("tp", 1), log["gpu"], log["stack"])))
        )

    return [case(log) for log in LOGS]


@pytest.mark.parametrize("log", logs())
def test_as_much_cache_as_engines_logged(log: dict[str, Any]) -> None:
    known = stack(log["stack"])
    known = known.with_memory_share(log.get("share", known.memory_share))
    known = replace(known, logit_bytes=log.get("logit_bytes", known.logit_bytes))
    formats = {name: log.get(name) for name in ("dtype", "cache")}
    place = deployed(log["model"], on=log["gpu"], engine=known, tp=log.get("tp", 1), **formats)
    limits: dict[str, Any] = {name: log[name] for name in ("max_num_seqs", "max_num_batched_tokens") if name in log}
    longest = log.get("max_model_len", 16384)
    settings = engine_settings(place, limits)
    tokens = logged_tokens(place, settings, longest)
    gib = tokens * cache_bytes(place, longest, settings.max_num_batched_tokens) / longest / 2**30
    found = tokens if "tokens" in log else gib
    assert found == pytest.approx(log.get("tokens") or log["gib"], rel=log["within"])


def test_logs_of_many_cards_say_where_they_are_from() -> None:
    for log in LOGS:
        assert set(log) <= {"model", "gpu", "tp", "stack"} | FIGURES | FLAGS and log["source"]
        assert log["within"] <= (0.03 if log["gpu"] == "h200_sxm" else 0.08)
    assert len({log["gpu"] for log in LOGS}) >= 12


def test_an_image_encoder_is_tried_with_the_largest_image() -> None:
    """Qwen3.5-9B: 16,384 tokens of 2 x 2 patches, each of 3 x 2 x 16 x 16 pixels and 1152 numbers; at the widest
    moment 15 of these: input, norm, three projections, and queries and keys beside each other, in fp32, and rotated.
    A GPU of two has half of the heads. Outputs of 4096 numbers are kept."""
    one, two = (encoder_bytes(deployed("qwen3.5-9b", tp=tp), 8192) for tp in (1, 2))
    assert one == (16384 * 4 * (1536 + 15 * 1152) * 2, 16384 * 4096 * 2)
    assert two == (16384 * 4 * (1536 + (2 + 13 / 2) * 1152) * 2, 16384 * 4096 * 2)
    assert encoder_bytes(deployed("qwen3.5-9b"), 32768)[0] == 2 * one[0]  # a step of more tokens has more images
    assert encoder_bytes(deployed("llama-3.1-8b"), 8192) == (0.0, 0.0)


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
