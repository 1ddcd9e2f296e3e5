"""A prompt's cache on its way from the GPUs that read it to those that decode.

Every GPU has a port of its own. A rank that decodes gets all that its GPUs keep of the prompt: heads are cut, but a
latent, or heads that are fewer than GPUs, goes to each of them.
"""

from __future__ import annotations

import math

from kernelcast.calls import Call, Launch
from kernelcast.networks.forward import Deployment
from kernelcast.parallel.layout import one_domain
from kernelcast.serving.memory import cache_bytes
from kernelcast.span import Span
from kernelcast.times import Times

_PIECE_BYTES = 2**32  # more than that is sent in several


def handed_bytes(decode: Deployment, tokens: int) -> float:
    """What the cache of a prompt of so many tokens fills on all GPUs of a rank that decodes it."""
    layout = decode.layout
    return float(cache_bytes(decode, tokens)) * layout.dp * layout.tp * layout.pp  # cache_bytes: mean over ranks


def ports(place: Deployment) -> int:
    """GPUs of one rank, each of which has its part of a request's cache."""
    return place.layout.tp * place.layout.pp


def port_bytes(prefill: Deployment, decode: Deployment, tokens: int, leaving: int = 1, coming: int = 1) -> float:
    """Bytes through the busiest port where a rank sends the caches of ``leaving`` prompts at once and one gets
    ``coming`` of them."""
    each = handed_bytes(decode, tokens)
    return max(leaving * each / ports(prefill), coming * each / ports(decode))


def transfer_fabric(prefill: Deployment, named: str | None) -> str | None:
    """The link that caches take: the one that is named; NVLink where it reaches across a rack (None: the GPU's own);
    else what links nodes."""
    layout = prefill.layout
    return named or (layout.link if one_domain(prefill.gpu) else layout.between_nodes)


def send(sent_bytes: float, fabric: str | None) -> Launch:
    """One GPU's part to one other, in pieces that go one after another."""
    pieces = max(1, math.ceil(sent_bytes / _PIECE_BYTES))
    words = {"dtype": "bf16", "fabric": fabric, "stack": "nccl"}
    return Launch("KV cache", Call.of("send_recv", {"bytes": max(1, math.ceil(sent_bytes / pieces)), **words}), pieces)


def sent(launch: Launch, times: Times) -> Span:
    """How long it takes; ``times`` knows the call."""
    return times[launch.call].span * launch.count
