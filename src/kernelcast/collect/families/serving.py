"""Batches as serving engines have them under load: prefill chunks beside decodes, lengths all different, in pages."""

from __future__ import annotations

from kernelcast.collect.sampling import Draw, Drawn, Table

_SHORTEST, _LONGEST = 128, 32768  # tokens of a request's past
_MOST_KEYS_BYTES = 6e9  # of the KV cache that a call reads
_MOST_NEW = 16384  # tokens of a step
_PAGES = (16, 16, 64)
_LATENT_HEADS = (128, 64, 32, 16, 16, 8)  # DeepSeek's 128, sharded
_LATENT_BYTES = 2 * (512 + 64)


def heads(draw: Draw) -> Drawn:
    """Heads of a rank: KV heads sharded by tensor parallelism, and the usual group sizes."""
    kv_heads = draw.pick((1, 1, 2, 4, 8, 8))
    group = draw.pick((1, 2, 4, 4, 5, 7, 8, 8)) if draw.chance(0.5) else draw.pick((1, 4, 8))
    return {"q_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 128}


def _pasts(draw: Draw, count: int, token_bytes: float) -> list[int]:
    """Tokens of ``count`` requests: log-uniform between two ends of the batch's own, fewer requests where the cache of
    all would not fit."""
    ends = sorted(draw.size(_SHORTEST, _LONGEST) for _ in range(2))
    if draw.chance(0.3):
        ends = [_SHORTEST, _LONGEST]
    lengths: list[int] = []
    for _ in range(count):
        length = draw.size(ends[0], ends[1])
        if lengths and (sum(lengths) + length) * token_bytes > _MOST_KEYS_BYTES:
            break
        lengths.append(length)
    return lengths


def _chunks(draw: Draw, count: int) -> list[tuple[int, int]]:
    """(new, attended) tokens of prompts that are prefilled: half of them a part of a longer one."""
    chunks: list[tuple[int, int]] = []
    for _ in range(count):
        new = draw.size(64, 8192, draw.pick((1, 1, 16, 64)))
        if chunks and sum(n for n, _ in chunks) + new > _MOST_NEW:
            break
        chunks.append((new, new + (draw.size(_SHORTEST, _LONGEST) if draw.chance(0.5) else 0)))
    return chunks


def _call(draw: Draw, requests: list[tuple[int, int]], base: Drawn) -> Drawn:
    """Equal requests as batch and lengths, others as lists. Engines put decodes first, or keep the order of arrival."""
    if draw.chance(0.25):
        requests = [requests[at] for at in draw.order(len(requests))]
    queries, keys = ([int(pair[at]) for pair in requests] for at in (0, 1))
    if len(set(requests)) == 1:
        return {**base, "batch": len(requests), "q_len": queries[0], "kv_len": keys[0]}
    return {**base, "q_lens": queries, "kv_lens": keys}


def _paged_base(draw: Draw, backend: str, kv_dtype: str) -> Drawn:
    stored = {"kv_dtype": kv_dtype} if kv_dtype != "bf16" else {}
    return {"op": "attention", **heads(draw), "page_size": draw.pick(_PAGES), "backend": backend, **stored,
            "dtype": "bf16", "stack": "flashinfer"}  # fmt: skip


def _token_bytes(call: Drawn) -> float:
    return 2.0 * call["kv_heads"] * call["head_dim"] * (1 if "kv_dtype" in call else 2)


def mixed(draw: Draw, backend: str, kv_dtype: str = "bf16") -> Drawn:
    """A step of an engine with chunked prefill: decodes, and one to four chunks, in one launch."""
    base = _paged_base(draw, backend, kv_dtype)
    decodes = [(1, past) for past in _pasts(draw, draw.size(1, 128), _token_bytes(base))]
    return _call(draw, decodes + _chunks(draw, draw.pick((1, 1, 1, 2, 2, 3, 4))), base)


def chunked(draw: Draw, backend: str) -> Drawn:
    """Prefill alone, over pages."""
    base = _paged_base(draw, backend, "bf16")
    if draw.chance(0.3):
        new, past = draw.size(16, 8192, draw.pick((1, 16, 128))), draw.size(16, _LONGEST) if draw.chance(0.5) else 0
        return _call(draw, [(new, new + past)] * draw.size(1, 16), base)
    return _call(draw, _chunks(draw, draw.size(1, 12)), base)


def decode(draw: Draw, kv_dtype: str, ragged: float) -> Drawn:
    """A decode step; ``ragged``: the share of batches whose lengths differ."""
    base = _paged_base(draw, "flashinfer", kv_dtype)
    count = draw.size(1, 256)
    if draw.chance(ragged):
        return _call(draw, [(1, past) for past in _pasts(draw, count, _token_bytes(base))], base)
    return _call(draw, [(1, draw.size(64, 2 * _LONGEST))] * count, base)


def latent_decode(draw: Draw, backend: str) -> Drawn:
    """Latent attention with absorbed weights; one token in ten steps has a drafted one beside it."""
    base = {"op": "mla", "q_heads": draw.pick(_LATENT_HEADS), "page_size": draw.pick((1, 16, 64, 64)),
            "backend": backend, "dtype": "bf16", "stack": "flashinfer"}  # fmt: skip
    count, new = draw.size(1, 256), 2 if draw.chance(0.1) else 1
    if draw.chance(0.6):
        return _call(draw, [(new, past) for past in _pasts(draw, count, _LATENT_BYTES)], base)
    return _call(draw, [(new, draw.size(64, 2 * _LONGEST))] * count, base)


def latent_prefill(draw: Draw, backend: str) -> Drawn:
    """Prefill of expanded heads: whole prompts, and chunks over a past that was expanded again."""
    base = {"op": "mla", "q_heads": draw.pick(_LATENT_HEADS), "absorbed": "no", "backend": backend, "dtype": "bf16",
            "stack": "flashinfer"}  # fmt: skip
    if draw.chance(0.5):
        new = draw.size(16, 8192, draw.pick((1, 16, 128)))
        return _call(draw, [(new, new + (draw.size(128, 8192) if draw.chance(0.3) else 0))] * draw.size(1, 16), base)
    return _call(draw, _chunks(draw, draw.size(1, 8)), base)


def sampling(draw: Draw) -> Drawn:
    vocab = draw.model().vocab if draw.chance(0.7) else draw.size(8192, 262144, draw.pick((4, 64)))
    rows = draw.pick((1, 2, 4, 8, 16, 32, 64, 128, 256, 512)) if draw.chance(0.4) else draw.size(1, 1024)
    return {"op": "top_k_top_p_sampling", "rows": rows, "cols": vocab, "keep": draw.pick(("both", "top_k", "top_p")),
            "dtype": "fp32", "stack": "flashinfer"}  # fmt: skip


TABLE: Table = {
    "flashinfer-mixed-fa3": (lambda draw: mixed(draw, "fa3"), 4),
    "flashinfer-mixed-fa2": (lambda draw: mixed(draw, "flashinfer"), 4),
    "flashinfer-mixed-fp8": (lambda draw: mixed(draw, "flashinfer", "fp8"), 1.5),
    "flashinfer-chunked-fa3": (lambda draw: chunked(draw, "fa3"), 1.5),
    "flashinfer-chunked-fa2": (lambda draw: chunked(draw, "flashinfer"), 1.5),
    "flashinfer-decode-ragged": (lambda draw: decode(draw, "bf16", 1.0), 2.5),
    "flashinfer-decode-fp8": (lambda draw: decode(draw, "fp8", 0.5), 3),
    "flashinfer-mla-fa3": (lambda draw: latent_decode(draw, "fa3"), 2.5),
    "flashinfer-mla-fa2": (lambda draw: latent_decode(draw, "flashinfer"), 2),
    "flashinfer-mla-prefill-fa3": (lambda draw: latent_prefill(draw, "fa3"), 1.5),
    "flashinfer-mla-prefill-fa2": (lambda draw: latent_prefill(draw, "flashinfer"), 1),
    "flashinfer-sampling": (sampling, 3),
}
