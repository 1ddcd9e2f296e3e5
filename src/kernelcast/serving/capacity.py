"""What a service carries at most: its throughput when requests never run out, which `vllm bench serve` measures with
``--request-rate inf``."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from kernelcast.serving.load import Load
from kernelcast.serving.service import EnginePool, Service

_FILLS = 4  # times that the engines are filled: the last requests, which run beside ever fewer others, count little
_MOST = 4000  # requests


def saturating(service: Service, load: Load) -> tuple[Service, Load, int]:
    """One of the equal parts of a service, requests like the load's all at once, and how many such parts there are."""
    prefill = service.prefill
    parts = math.gcd(service.pool.replicas, prefill.replicas if prefill else 0)
    part = replace(service, pool=_part(service.pool, parts), prefill=_part(prefill, parts) if prefill else None)
    if load.follows is not None:  # turns of conversations wait for each other, as they are
        return service, replace(load, arrivals_s=np.zeros(len(load)), max_concurrency=0, stages=None), 1
    count = min(_MOST, _FILLS * _together(part.pool, load))
    at = np.resize(np.arange(len(load)), max(count, min(len(load), _MOST)))
    if len(load) > len(at):
        at = np.linspace(0, len(load) - 1, len(at)).astype(np.int64)
    shared = tuple(load.shared[row] for row in at.tolist()) if load.shared else ()
    return part, Load(np.zeros(len(at)), load.inputs[at], load.outputs[at], shared), parts


def _part(pool: EnginePool, parts: int) -> EnginePool:
    return replace(pool, replicas=pool.replicas // parts)


def _together(pool: EnginePool, load: Load) -> int:
    """Requests that a pool runs at a time, at most."""
    held = pool.settings.kv_tokens / float((load.inputs + load.outputs / 2).mean())
    return max(1, int(min(held, pool.settings.max_num_seqs) * pool.deployment.layout.dp * pool.replicas))
