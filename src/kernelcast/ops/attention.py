"""attention and mla: scaled dot-product attention, prefill and decode, over a paged or contiguous KV cache.

mla is DeepSeek's multi-head latent attention. Decode attends to the latent: all heads share one key of kv_rank +
rope_dim values per token, whose first kv_rank are the value (weights absorbed into Q and O). Prefill expands K and V
per head, as MHA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import (
    Calls,
    Configuration,
    ConfigurationColumns,
    Conflicts,
    Kernel,
    choice,
    conflict,
    flag,
    labels,
    lengths,
    size,
)
from kernelcast.ops.flash import BACKENDS, flash_works, kv_cache_bytes
from kernelcast.ops.kernel_selection import stack_backend
from kernelcast.ops.movement import token_move
from kernelcast.ops.requests import Heads, RequestBatch, equal_heads, head_conflicts, length_conflicts, length_features
from kernelcast.ops.work import Array, Works
from kernelcast.stacks import Stack, runner

_XQA_GROUP = 32.0  # widest group that TensorRT-LLM's XQA decode kernel packs; its older kernel does not
_DRAFTED = 8  # new tokens per request of a decode, draft tokens included
_DEFAULT_PAGE = 16  # tokens, where the stack has no default
# The attention layer of a serving engine also writes new keys and values to the cache; TensorRT-LLM's rotates Q and K
# in the same pass.
_MOVED_BY_ENGINE = {"vllm": "kv", "sglang": "kv", "trtllm": "q+kv"}


class OverCache(Kernel):
    """Parameters of both ops: a batch of requests, equal or ragged, over a KV cache."""

    batch: int | None = size("requests", default=None)
    q_len: int | None = size("new tokens per request", default=None)
    kv_len: int | None = size("context length per request, new tokens included", default=None)
    q_lens: tuple[int, ...] | None = lengths("new tokens of each request (ragged batch)", default=None)
    kv_lens: tuple[int, ...] | None = lengths("context length of each request (ragged batch)", default=None)
    q_heads: int = size("query heads", high=65536)
    causal: bool = flag("causal mask", default=True)
    page_size: int | None = size("tokens per KV cache block, 0: not paged", default=None, low=0, high=1 << 20)
    kv_dtype: str | None = choice("dtype of the KV cache, default: dtype", ("fp16", "bf16", "fp8"), default=None)
    backend: str | None = choice("attention backend, default: the usual one on the GPU", tuple(BACKENDS), default=None)

    @classmethod
    def heads(cls, calls: Calls) -> Heads:
        raise TypeError(f"{cls.__name__} defines no heads")

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        requests, pages = RequestBatch.of(calls), calls["page_size"]
        decodes = (requests.queries <= _DRAFTED) & (requests.keys > requests.queries)
        most, least = (each(decodes.astype(np.float64)) for each in (requests.most, requests.least))
        return {
            **calls.choices,
            "kv_dtype": calls.choice("kv_dtype") or calls.choice("dtype"),
            "phase": np.where(least == 1, "decode", np.where(most == 1, "mixed", "prefill")).astype(object),
            "paged": np.where(np.isnan(pages), None, np.where(pages > 0, "yes", "no")),  # type: ignore[call-overload]
            "lengths": "equal" if requests.starts is None else _lengths(requests),
        }

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        """Measurements of engines do not say whether prefill reads KV blocks, so it is one configuration whatever the
        call says."""
        filled, stack = dict(configuration), runner(configuration.get("stack"))
        in_pages = stack is not None and stack.page_size > 0
        if configuration["phase"] == "prefill":
            filled["paged"] = "no" if in_pages and isinstance(stack, Stack) else configuration["paged"] or "no"
        else:
            filled["paged"] = configuration["paged"] or ("yes" if in_pages else "no")
        if stack is None:
            return filled
        named = configuration["backend"] or stack_backend(cls.op, configuration, gpu)
        return filled | {"backend": dict(stack.called).get(named or "", named)}

    @classmethod
    def with_choices(cls, calls: Calls, configuration: Configuration) -> Calls:
        chosen, pages = super().with_choices(calls, configuration), calls["page_size"]
        in_blocks = configuration.get("paged") == "yes"
        block = getattr(runner(configuration.get("stack")), "page_size", 0) or _DEFAULT_PAGE
        page_size = np.where(pages > 0, pages, block) if in_blocks else np.zeros(calls.count)
        chosen = replace(chosen, numbers={**chosen.numbers, "page_size": page_size})
        equal = configuration.get("lengths") == "equal" and configuration.get("phase") == "decode"
        return cls._with_equal_lengths(chosen) if equal else chosen

    @classmethod
    def _with_equal_lengths(cls, calls: Calls) -> Calls:
        """A ragged decode batch as the equal one that reads as many keys, for evidence of equal lengths only. Prefill
        is quadratic in its lengths and stays as it is."""
        if "q_lens" not in calls.lists:
            return calls
        requests = RequestBatch.of(calls)
        means = {name: requests.total(x) / requests.count
                 for name, x in (("q_len", requests.queries), ("kv_len", requests.keys))}  # fmt: skip
        lists = {name: values for name, values in calls.lists.items() if name not in ("q_lens", "kv_lens")}
        return replace(calls, numbers={**calls.numbers, "batch": requests.count, **means}, lists=lists)

    @classmethod
    def sizes(cls, calls: Calls) -> Mapping[str, Array]:
        """Means for a ragged batch; ``past``: cached tokens that are not new."""
        requests = RequestBatch.of(calls)
        queries, keys = (requests.total(x) / requests.count for x in (requests.queries, requests.keys))
        lengths = {"batch": requests.count, "q_len": queries, "kv_len": keys, "past": keys - queries}
        return {**super().sizes(calls), "page_size": np.full(calls.count, np.nan), **lengths}

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return length_conflicts(calls, cls.op)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return length_features(calls, cls.heads(calls))

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        return flash_works(gpu, calls, RequestBatch.of(calls), cls.heads(calls))


def _lengths(requests: RequestBatch) -> NDArray[Any]:
    """ "equal" where all lengths of a list are the same."""
    same = [requests.most(x) == requests.least(x) for x in (requests.queries, requests.keys)]
    return np.where(same[0] & same[1], "equal", "ragged").astype(object)


class Attention(OverCache):
    """Softmax(Q Kᵀ) V for a batch of requests: prefill, decode (q_len 1) and chunked prefill (q_len < kv_len).

    With a serving engine as its stack (vllm, sglang, trtllm) it is the engine's attention layer as measured: new keys
    and values are written to the cache too, and TensorRT-LLM applies RoPE to Q and K.
    """

    op = "attention"
    dtypes = ("fp32", "fp16", "bf16", "fp8")
    examples = (
        {"batch": 4, "q_len": 2048, "kv_len": 2048, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
        {"batch": 64, "q_len": 1, "kv_len": 4096, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16},
        {"q_lens": [512, 1, 1], "kv_lens": [512, 900, 7000], "q_heads": 32, "kv_heads": 8, "head_dim": 128},
    )
    trailing_parameters = ("causal", "window", "page_size", "kv_dtype", "backend")
    batch_parameter = "batch"
    model_sizes = ("head_dim", "window", "q_heads", "kv_heads")

    kv_heads: int | None = size("KV heads; fewer than q_heads is GQA, default: q_heads", default=None, high=65536)
    head_dim: int = size("head dimension", high=4096)
    window: int | None = size("sliding window in tokens, 0: none", default=None, low=0)

    @classmethod
    def heads(cls, calls: Calls) -> Heads:
        return equal_heads(calls, _XQA_GROUP if calls.choice("stack") == "trtllm" else np.inf)

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        loose = (calls.given("window", 0) > 0) & (calls["causal"] == 0)
        return (
            head_conflicts(calls)
            or conflict(loose, "a sliding window needs causal attention", {})
            or super().conflicts(calls)
        )

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        window = np.where(calls.given("window", 0.0) > 0, "window", np.where(calls["causal"] > 0, "causal", "none"))
        return {**super().configuration(calls), "mask": window.astype(object)}

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        window, paged = calls.given("window", 0.0), (calls.given("page_size", 0.0) > 0) * 1.0
        reach = np.where(window > 0, np.log2(window + 1), 0.0)
        return super().shape_features(calls, gpu) | {"window": reach, "paged": paged}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        attended, moved = super().work(calls, gpu), _MOVED_BY_ENGINE.get(calls.choice("stack") or "")
        if moved is None:
            return attended
        act_bytes, kv_bytes = calls.dtype.act_bytes, kv_cache_bytes(calls)
        requests, heads = RequestBatch.of(calls), cls.heads(calls)
        elements = (2 * heads.kv + (heads.queries if moved == "q+kv" else 0.0)) * heads.qk_dim
        move = token_move(gpu, requests.total(requests.queries), elements, act_bytes, kv_bytes)
        kernels = 2.0 + (act_bytes != kv_bytes) + (act_bytes < 2)
        return (*attended, replace(move, launches=kernels))


class Mla(OverCache):
    """Multi-head latent attention (DeepSeek V2/V3): ``absorbed`` attends to the latent, else to expanded heads."""

    op = "mla"
    dtypes = ("fp16", "bf16", "fp8")
    examples = (
        {"batch": 64, "q_len": 1, "kv_len": 4096, "q_heads": 128},
        {"batch": 1, "q_len": 4096, "kv_len": 4096, "q_heads": 128, "absorbed": "no"},
    )
    trailing_parameters = ("causal", "page_size", "kv_dtype", "absorbed", "backend")

    kv_rank: int = size("latent dimension (kv_lora_rank)", default=512, high=65536)
    rope_dim: int = size("rotary dimensions of a key (qk_rope_head_dim)", default=64, high=4096)
    nope_dim: int = size("non-rotary dimensions of a key (qk_nope_head_dim)", default=128, high=4096)
    v_dim: int = size("value head dimension (v_head_dim)", default=128, high=4096)
    absorbed: str = choice("auto: absorbed when q_len is 1 or 2 (decode)", ("auto", "yes", "no"), default="auto")

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        """Prefill on the latent and prefill on expanded heads are different kernels."""
        latent = labels(cls.heads(calls).shared_where)
        return {**super().configuration(calls), "absorbed": latent}

    @classmethod
    def heads(cls, calls: Calls) -> Heads:
        """Latent heads where weights are absorbed, expanded heads elsewhere."""
        requests, how = RequestBatch.of(calls), calls.choice("absorbed")
        short = requests.most(requests.queries) <= 2
        latent = short if how == "auto" else np.full(calls.count, how == "yes")
        return Heads(
            queries=calls["q_heads"],
            kv=np.where(latent, 1.0, calls["q_heads"]),
            qk_dim=np.where(latent, calls["kv_rank"], calls["nope_dim"]) + calls["rope_dim"],
            v_dim=np.where(latent, calls["kv_rank"], calls["v_dim"]),
            shared_where=latent,
        )
