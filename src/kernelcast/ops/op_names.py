"""What other libraries call an op, for the error that refuses a name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from kernelcast.errors import KernelcastError, unknown

# Lower case, without punctuation; names of PyTorch, Triton, NCCL, vLLM and FlashInfer
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("matmul", "mm", "matrixmultiply", "dot"), ("gemm", "bmm")),
    **dict.fromkeys(("linear", "addmm", "fullyconnected", "dense", "sgemm", "hgemm", "gemv", "scaledmm"), ("gemm",)),
    **dict.fromkeys(("batchedgemm", "batchmatmul", "baddbmm", "einsum"), ("bmm",)),
    **dict.fromkeys(("groupedgemm", "groupgemm"), ("grouped_mm", "moe_gemm")),
    **dict.fromkeys(("fusedmoe", "mixtureofexperts", "experts"), ("moe", "moe_gemm")),
    **dict.fromkeys(("sdpa", "scaleddotproductattention", "flashattention", "flashattn", "mha", "gqa", "mqa", "fmha",
                     "pagedattention", "selfattention", "flashinfer", "fa2", "fa3"), ("attention",)),
    **dict.fromkeys(("flashmla", "multiheadlatentattention"), ("mla",)),
    **dict.fromkeys(("swiglu", "siluandmul"), ("silu_mul",)),
    **dict.fromkeys(("geglu", "geluandmul"), ("gelu_mul", "gelu_tanh_mul")),
    **dict.fromkeys(("swish",), ("silu",)),
    **dict.fromkeys(("rotary", "rotaryembedding", "ropeembedding"), ("rope",)),
    **dict.fromkeys(("layernormalization", "nativelayernorm", "ln"), ("layernorm",)),
    **dict.fromkeys(("rmsnormalization", "fusedaddrmsnorm"), ("rmsnorm",)),
    **dict.fromkeys(("conv", "convolution", "conv1d", "conv3d"), ("conv2d",)),
    **dict.fromkeys(("crossentropy", "crossentropyloss"), ("log_softmax", "nll_loss")),
    **dict.fromkeys(("reshapeandcache", "kvcache"), ("kv_write",)),
    **dict.fromkeys(("adam",), ("adamw",)),
    **dict.fromkeys(("memcpy", "clone", "contiguous"), ("copy",)),
    **dict.fromkeys(("quant", "quantise", "dequantize"), ("quantize",)),
    **dict.fromkeys(("sum", "mean", "reduce"), ("reduce_sum",)),
    **dict.fromkeys(("sendrecv", "send", "recv", "p2p"), ("send_recv",)),
    **dict.fromkeys(("mamba", "ssm", "ssd"), ("mamba2",)),
    **dict.fromkeys(("sampling", "sample"), ("top_k_top_p_sampling",)),
}  # fmt: skip


def unknown_op(op: str, known: Collection[str]) -> KernelcastError:
    """The error for a name that is no op's: the op of that name but for its punctuation, or what others call so."""
    folded = re.sub(r"[^a-z0-9]", "", op.lower())
    same = tuple(each for each in known if each.replace("_", "") == folded)
    return unknown("op", op, known, same or OTHER_NAMES.get(folded, ()))
