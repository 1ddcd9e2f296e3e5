"""More work is never faster, on the path that users get: networks answer, so each law says how far they keep it.

Examples are the same in every run: what a network makes of a corner that nobody looked at is no reason for a build to
fail, and the slack is what was seen on hundreds of calls of each kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kernelcast as kc
from kernelcast.inference.deployment import Deployment, Layout
from kernelcast.inference.infer import infer
from kernelcast.inference.workload import Workload
from kernelcast.models import model
from kernelcast.models.precision import Precision
from kernelcast.ops.kernel_selection import served_experts
from kernelcast.stacks import stack

few = settings(max_examples=25, derandomize=True)
SERVERS = ("h100_sxm", "h200_sxm", "b200_sxm", "gb200")
STACKS = ("vllm", "sglang", "trtllm")
PAGES = {name: stack(name).page_size for name in STACKS}
# hidden, width of an expert, experts, experts a token: Qwen3, DeepSeek, Mixtral, gpt-oss, Kimi, GLM-5, MiniMax
MODELS = ((2048, 768, 128, 8), (7168, 2048, 256, 8), (4096, 1536, 128, 8), (4096, 14336, 8, 2), (2880, 2880, 128, 4),
          (7168, 2048, 384, 8), (6144, 2048, 256, 8), (3072, 1536, 256, 8))  # fmt: skip
_EXACT = 1 - 1e-9
_SLACK = 0.95  # 0.967 was the least of 300 doubled contexts of each kind


def times(op: str, calls: Sequence[dict[str, Any]], gpu: str, predictor: str = "learned") -> NDArray[Any]:
    """Microseconds of each."""
    names = sorted({name for call in calls for name in call})
    columns = {name: [call.get(name) for call in calls] for name in names}
    table = {"op": [op] * len(calls), **columns}
    return np.array(kc.predict_table(table, gpu, kc.Conditions(predictor=predictor))["predicted_us"])


# ---- experts ----


@st.composite
def layers(draw: st.DrawFn, rows: int) -> tuple[dict[str, Any], str]:
    """Experts of a real model on a GPU, at least so many rows for each expert."""
    gpu = draw(st.sampled_from((*SERVERS, "a100_sxm", "l40s")))
    hidden, inter, experts, topk = draw(st.sampled_from(MODELS))
    formats = ["bf16", "int4"] + (["fp8", "fp8_block"] if gpu != "a100_sxm" else [])
    formats += ["nvfp4"] if gpu in ("b200_sxm", "gb200") else []
    name = draw(st.sampled_from(STACKS))
    dtype, backend = served_experts(name, kc.gpu(gpu), draw(st.sampled_from(formats)))
    least = max(1, -(-rows * experts // topk))
    sizes = {"tokens": draw(st.integers(least, 8 * least)), "hidden": hidden, "inter": inter, "experts": experts}
    cut = {"topk": topk, "ep": draw(st.sampled_from((1, 8))), "tp": draw(st.sampled_from((1, 2)))}
    return {**sizes, **cut, "dtype": dtype, "backend": backend, "stack": name}, gpu


@few
@given(layers(rows=16))
def test_more_uneven_experts_are_never_faster_where_each_has_rows(asked: tuple[dict[str, Any], str]) -> None:
    call, gpu = asked
    # balanced, of no more than whole blocks of rows: one row above pads every expert, where uneven ones pad some
    rows = call["tokens"] * call["topk"] // call["experts"]
    whole = {
        "tokens": rows // (block := min(2 ** (rows.bit_length() - 1), 128)) * block * call["experts"] // call["topk"]
    }
    ways: tuple[dict[str, Any], ...] = (
        {"routing": "balanced", **whole}, {"routing": "random"}, {"skew": 1.01}, {"skew": 1.2}
    )  # fmt: skip
    even, chance, mild, more = times("moe", [{**call, **way} for way in ways], gpu)
    assert even <= mild / _EXACT and mild <= more / _EXACT
    assert even <= chance / _EXACT


@few
@given(layers(rows=16), st.sampled_from(({"routing": "balanced"}, {"skew": 1.2})))
def test_twice_the_experts_a_token_are_never_faster_by_physics(
    asked: tuple[dict[str, Any], str], way: dict[str, Any]
) -> None:
    call, gpu = asked
    one, two = times("moe", [{**call, **way, "topk": n * call["topk"]} for n in (1, 2)], gpu, "generic")
    assert one <= two / _EXACT


# One call is forecast 22% faster by the weights of 2026.11.19.1
MISSED = pytest.mark.xfail(
    strict=True, reason="twice the experts a token are up to 22% faster on a B200 in bf16, not 20"
)


@pytest.mark.parametrize(
    ("gpu", "dtype"),
    [
        *itertools.product(("h100_sxm", "h200_sxm"), ("bf16", "fp8_block")),
        ("b200_sxm", "fp8_block"),
        pytest.param("b200_sxm", "bf16", marks=MISSED),
    ],
)
def test_twice_the_experts_a_token_are_seldom_faster(gpu: str, dtype: str) -> None:
    """Campaigns have one such number a shape (but for one), so a network guesses: at most one in twenty is faster, by a
    fifth, most of them Mixtral's eight wide experts."""
    for name in STACKS:
        kind, backend = served_experts(name, kc.gpu(gpu), dtype)
        words = {"dtype": kind, "backend": backend, "stack": name, "skew": 1.2}
        calls = [
            {**words, "tokens": tokens, "hidden": hidden, "inter": inter, "experts": experts, "topk": each, "ep": ep}
            for hidden, inter, experts, topk in MODELS
            for ep, tokens in itertools.product((1, 8), (1, 8, 64, 512, 4096, 16384))
            for each in (topk, 2 * topk)
        ]
        found = times("moe", calls, gpu).reshape(-1, 2)
        more = found[:, 1] / found[:, 0]
        assert np.mean(more < 0.98) <= 0.05 and more.min() > 0.8


# ---- longer contexts ----


@st.composite
def decodes(draw: st.DrawFn, shortest: int = 512, longest: int = 32768) -> tuple[int, int]:
    """Sequences and the tokens of each, within what a GPU holds."""
    batch = draw(st.integers(1, 256))
    return batch, draw(st.integers(shortest, max(shortest, min(longest, 3_000_000 // batch))))


def doubled(op: str, gpu: str, batch: int, tokens: int, **words: Any) -> float:
    """Time of a decode step with twice the context over that with the context."""
    given = {"batch": batch, "q_len": 1, "page_size": PAGES[words["stack"]], **words}
    once, twice = times(op, [{**given, "kv_len": n * tokens} for n in (1, 2)], gpu)
    return float(twice / once)


HEADS = ((32, 8, 128), (8, 1, 128), (64, 4, 128), (16, 1, 128), (4, 1, 256), (32, 2, 256))


@few
@given(decodes(), st.sampled_from(HEADS), st.sampled_from((None, "fp8")), st.sampled_from(STACKS),
       st.sampled_from(SERVERS))  # fmt: skip
def test_attention_over_twice_the_keys_is_not_faster(
    asked: tuple[int, int], heads: tuple[int, int, int], kv_dtype: str | None, name: str, gpu: str
) -> None:
    """TensorRT-LLM's on Hopper cuts few long sequences into parts from some length on, and was measured at half the
    time there (one sequence, 64 heads: 1,024 keys to 2,048)."""
    sizes: dict[str, Any] = dict(zip(("q_heads", "kv_heads", "head_dim"), heads, strict=True))
    cuts = name == "trtllm" and gpu.startswith("h") and kv_dtype is None
    found = doubled("attention", gpu, *asked, stack=name, kv_dtype=kv_dtype, **sizes)
    assert found >= (0.5 if cuts else _SLACK)


@few
@given(decodes(), st.sampled_from((8, 16, 32, 64, 128)), st.sampled_from(("bf16", "fp8_block")),
       st.sampled_from(("bf16", "fp8")), st.sampled_from(STACKS), st.sampled_from(SERVERS))  # fmt: skip
def test_latent_attention_over_twice_the_keys_is_not_faster(
    asked: tuple[int, int], heads: int, dtype: str, kv_dtype: str, name: str, gpu: str
) -> None:
    words: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "stack": name, "q_heads": heads}
    assert doubled("mla_layer", gpu, *asked, **words) >= _SLACK


@few
@given(decodes(), st.sampled_from((8, 16, 32, 64, 128)), st.sampled_from(("bf16", "fp8_block")),
       st.sampled_from(("bf16", "fp8")), st.sampled_from(("h100_sxm", "h200_sxm")))  # fmt: skip
def test_sparse_attention_over_twice_the_keys_is_not_faster(
    asked: tuple[int, int], heads: int, dtype: str, kv_dtype: str, gpu: str
) -> None:
    """SGLang's on Hopper. TensorRT-LLM's was measured slower at 2,049 keys, the first that it chooses among, than at
    twice as many (half the time on B200), which other kinds' forecasts take after."""
    words: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "stack": "sglang", "q_heads": heads}
    assert doubled("dsa_layer", gpu, *asked, **words) >= _SLACK


# ---- whole models ----


@cache
def place(name: str, gpu: str, engine: str, dtype: str | None = None, tp: int = 8) -> Deployment:
    found = model(name)
    return Deployment(found, kc.gpu(gpu), stack(engine), Precision.of(found, dtype), Layout(tp=tp))


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5", "qwen3.5-397b-a17b"])
@pytest.mark.parametrize("engine", STACKS)
@pytest.mark.parametrize("gpu", ["h200_sxm", "b200_sxm"])
def test_a_token_after_a_longer_prompt_is_not_faster(name: str, engine: str, gpu: str) -> None:
    where = place(name, gpu, engine, "fp8_block" if name == "glm-5" else None)
    steps = np.array([infer(where, Workload.equal(1, tokens, 8)).tpot.value for tokens in (1024, 4096, 16384, 65536)])
    assert (steps[1:] >= 0.99 * steps[:-1]).all()
    assert steps[-1] > 1.02 * steps[0]


@few
@given(st.sampled_from(((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 28672),
                        (5120, 5120), (1024, 2048), (12288, 5120))), st.sampled_from(("bf16", "fp8", "fp8_block")),
       st.sampled_from(STACKS), st.sampled_from(SERVERS))  # fmt: skip
def test_one_row_is_not_slower_than_two(shape: tuple[int, int], dtype: str, name: str, gpu: str) -> None:
    """But for vLLM's fp8 products on Blackwell: measured at about 2.2 times two rows' time, up to 3."""
    n, k = shape
    one, two = times("gemm", [{"m": m, "n": n, "k": k, "dtype": dtype, "stack": name} for m in (1, 2)], gpu)
    measured_so = (dtype, name) == ("fp8", "vllm") and gpu in ("b200_sxm", "gb200")
    assert one <= (3.5 if measured_so else 1.08) * two


@pytest.mark.parametrize(("engine", "most"), [("vllm", 3.5), ("sglang", 1.02), ("trtllm", 1.02)])
def test_one_request_is_not_slower_than_two(engine: str, most: float) -> None:
    where = place("llama-3.1-8b", "b200_sxm", engine, "fp8", tp=1)
    one, two = (infer(where, Workload.equal(batch, 512, 4)).step.value for batch in (1, 2))
    assert one <= most * two
