"""What one static batch takes of a GPU's memory by hand, what fits, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from deployments import deployed, refusal

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.inference.infer import infer
from kernelcast.inference.memory import cache_bytes, largest_batch, memory, weight_bytes
from kernelcast.inference.workload import Workload
from kernelcast.stacks import stack

# ---- memory ----


def test_weights_of_llama() -> None:
    # 8,030,261,248 weights of 2 bytes; cut over two, the 65 norms of 4096 stay whole on each
    assert weight_bytes(deployed()) == 8_030_261_248 * 2
    assert weight_bytes(deployed(tp=2)) == (8_030_261_248 - 65 * 4096) + 65 * 4096 * 2
    # fp8: layers a byte each; embedding, head (128256 x 4096 each) and norms keep 2
    kept = 2 * 128256 * 4096 + 65 * 4096
    assert weight_bytes(deployed(dtype="fp8")) == 8_030_261_248 + kept
    # two stages: half of the layers, and the embedding or the head
    ends = 2 * 128256 * 4096
    assert weight_bytes(deployed(pp=2)) == (8_030_261_248 - ends) + ends


def test_a_token_of_llama_takes_128_kib_of_cache() -> None:
    # keys and values x 8 heads x 128 x 32 layers x 2 bytes
    assert cache_bytes(deployed(), 1) == 2 * 8 * 128 * 32 * 2 == 131_072
    assert cache_bytes(deployed(), 1000) == 131_072_000
    assert cache_bytes(deployed(cache="fp8"), 1) == 65_536
    # cut by tp until each GPU has one head
    assert [cache_bytes(deployed(tp=tp), 1) for tp in (2, 8, 16)] == [65_536, 16_384, 16_384]
    assert cache_bytes(deployed(pp=4), 1) == cache_bytes(deployed(dp=4), 1) == 32_768


def test_a_latent_is_not_cut() -> None:
    # (512 + 64) x 61 layers x 2 bytes on every GPU
    for tp in (1, 8):
        assert cache_bytes(deployed("deepseek-v3", tp=tp), 1) == 576 * 61 * 2


def test_a_window_caps_the_cache() -> None:
    # Gemma 2 9B: 42 layers, half with a window of 4096; keys and values of 8 heads x 256 x 2 bytes
    assert cache_bytes(deployed("gemma-2-9b"), 8000) == 21 * (4096 + 8000) * 2 * 8 * 256 * 2
    assert cache_bytes(deployed("gemma-2-9b"), 4000) == 42 * 4000 * 2 * 8 * 256 * 2


def test_an_encoder_has_no_cache() -> None:
    assert cache_bytes(deployed("bert-base"), 512) == 0


def test_activations_are_of_the_widest_layer_or_the_logits() -> None:
    # 1000 tokens x (4 x 4096 + 3 x 14336) x 2 bytes; 1000 rows of logits are 1000 x 128256 x 14
    place = deployed()
    assert memory(place, {}, 1000, 1)["activation"] == 1000 * (4 * 4096 + 3 * 14336) * 2
    assert memory(place, {}, 1000, 1000)["activation"] == 1000 * 128256 * 14


def test_memory_holds_every_request_at_its_end() -> None:
    found = infer(deployed(), Workload((100, 300), (11, 51))).memory
    assert found["cache"] == (111 + 351) * 131_072
    assert found["activation"] == max(400 * (4 * 4096 + 3 * 14336) * 2, 2 * 128256 * 14)
    assert found["stack"] == stack("vllm").reserved_bytes
    assert found.available_bytes == stack("vllm").used_share * kc.gpu("h100_sxm").allocatable_bytes
    assert found.used_bytes + found.free_bytes == pytest.approx(found.available_bytes)


# ---- what does not fit ----


@pytest.mark.parametrize(
    ("how", "workload"),
    [
        ({}, Workload.equal(1000, 1024, 128)),
        ({}, Workload.equal(1000, 1024, 128, cached=1000)),
        ({}, Workload.equal(1000, 1024, 128, chunk=2048)),
        ({"tp": 2}, Workload.equal(2000, 2048, 512)),
    ],
)
def test_the_refusal_says_by_how_much_and_what_fits(how: dict[str, Any], workload: Workload) -> None:
    place = deployed(**how)
    said = refusal(place, workload)
    largest = int(re.findall(r"the largest batch of such requests is (\d+)$", said)[0])
    assert largest == largest_batch(place, workload) > 0

    def of(batch: int) -> Workload:
        first = (workload.inputs[0], workload.outputs[0], workload.past[0])
        return Workload.equal(batch, *first, chunk=workload.chunk)

    assert infer(place, of(largest)).memory.free_bytes >= 0
    assert "GiB more than" in refusal(place, of(largest + 1))


def test_the_refusal_counts_every_use() -> None:
    # 1000 x (1024 + 128) tokens: weights 15.0 GiB, cache 1152 x 128 KiB x 1000 = 140.6, activations 1,024,000 tokens
    # x 59392 numbers x 2 bytes = 113.3; in steps of 8192 tokens, as vLLM prefills, 0.9; logits of 1000
    # sequences, 128256 x 14 bytes each, 1.7
    engine, gib = stack("vllm"), 2**30
    assert "KV cache 140.6, activations 1.7" in refusal(deployed(), Workload.equal(1000, 1024, 128))
    said = refusal(deployed(), Workload.equal(1000, 1024, 128, chunk=0))
    assert "weights 15.0, KV cache 140.6, activations 113.3" in said
    used = 8_030_261_248 * 2 + 1_152_000 * 131_072 + 1_024_000 * 59_392 * 2 + engine.reserved_bytes
    missing = used - engine.used_share * kc.gpu("h100_sxm").allocatable_bytes
    assert f"{missing / gib:.1f} GiB more than" in said


def test_weights_that_are_too_large_say_so() -> None:
    said = refusal(deployed("llama-3.1-70b"), Workload.equal(1, 100, 10))
    assert "its weights alone are too large" in said and "`tp`" in said
    assert infer(deployed("llama-3.1-70b", tp=4), Workload.equal(1, 100, 10)).memory.free_bytes > 0


def test_a_request_too_long_for_memory_says_what_to_do() -> None:
    # one request of 128k tokens on 24 GB: the weights fit, its cache of 16 GiB does not
    said = refusal(deployed(on="l4"), Workload.equal(1, 130_000, 1000, chunk=2048))
    assert "take fewer or shorter requests" in said


def test_the_largest_batch_of_a_small_model_is_found_at_once() -> None:
    # each of 225,000 requests: 2 tokens x keys and values x 768 x 12 layers x 2 bytes of cache, and a row of
    # 50272 logits x 14 bytes
    place, engine = deployed("opt-125m", on="b200_sxm"), stack("vllm")
    free = engine.used_share * place.gpu.allocatable_bytes - engine.reserved_bytes - weight_bytes(place)
    assert largest_batch(place, Workload.equal(1, 1, 1)) == free // (2 * 2 * 768 * 12 * 2 + 50272 * 14) > 200_000


# ---- refusals ----


def test_an_encoder_writes_nothing() -> None:
    assert "bert-base is an encoder" in refusal(deployed("bert-base"), Workload.equal(1, 100, 2))


def test_the_context_is_a_limit() -> None:
    # Llama 3.1: 131,072 tokens, prompt and output together
    assert "131,073 tokens exceeds the context of llama-3.1-8b, 131,072" in refusal(
        deployed(), Workload.equal(1, 131_000, 73, chunk=2048)
    )
    assert infer(deployed(), Workload.equal(1, 131_000, 72, chunk=2048)).steps == 71
    # an encoder writes none: its 512 positions are all for the prompt
    assert infer(deployed("bert-base"), Workload.equal(1, 512, 1)).prefill.value > 0
    assert "513 tokens exceeds the context of bert-base, 512" in refusal(
        deployed("bert-base"), Workload.equal(1, 513, 1)
    )


@pytest.mark.parametrize(
    ("inputs", "outputs", "cached", "chunk", "said"),
    [
        ((), (), (), 0, "give one of each"),
        ((1, 2), (1,), (), 0, "2 prompts and 1 outputs"),
        ((0,), (1,), (), 0, "at least one input token"),
        ((1,), (0,), (), 0, "one output token"),
        ((5, 5), (1, 1), (1,), 0, "1 cached prefixes for 2 prompts"),
        ((5,), (1,), (5,), 0, "cached tokens must be fewer"),
        ((5,), (1,), (), -1, "not -1"),
    ],
)
def test_requests_that_cannot_be_are_refused(
    inputs: tuple[int, ...], outputs: tuple[int, ...], cached: tuple[int, ...], chunk: int, said: str
) -> None:
    with pytest.raises(KernelcastError, match=said):
        Workload(inputs, outputs, cached, chunk)


def test_a_format_that_the_gpu_lacks_is_refused_in_its_words() -> None:
    said = refusal(deployed(on="a100_sxm", dtype="fp8"), Workload.equal(1, 100, 2))
    assert said.startswith("a100_sxm has no fp8 matrix arithmetic; it has")
    assert "row" not in said  # of a table that nobody gave
