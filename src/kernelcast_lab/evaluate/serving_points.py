"""Engines that hold so many requests in flight, as AIConfigurator's table of measured deployments has them, against
simulations of the same closed loop: whole, and with prompts read elsewhere (disaggregated).

Points of InferenceX draw lengths from 0.8 to 1 of the nominal ones, ten requests for each in flight, and run by recipes
that are public. Of the others nothing is told: fixed lengths, and steps that take one prompt and the batch (or 2,048
tokens, vLLM's default then), as AIConfigurator writes them for engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.inference.deployment import Deployment
from kernelcast.serving.load import Load
from kernelcast.serving.service import Pool, Service, settings_of
from kernelcast.serving.simulate import Simulation, simulate
from kernelcast.serving.step_times import Tables, tables_for
from kernelcast.stacks import Stack, stack
from kernelcast_lab.data.serving import ServingPoint, SplitPoint, left_out, serving_points, split_points
from kernelcast_lab.evaluate.served import Compared, by_group
from kernelcast_lab.evaluate.serving_places import deployment_of, guesses_of
from kernelcast_lab.evaluate.split_points import static_points

Stacks = Callable[[str], Stack]
FEW = 4  # requests in flight, up to which TTFT is hardly a queue
_ASKED = 10  # requests for each in flight
_MOST = 640  # requests of a point, or four for each in flight
_DP_WAIT = 60  # timeout_iters of InferenceX's recipes with attention DP
_RECV_FROM = 16  # requests in flight
_ADMITTED = 0.5  # of the requests in flight, that decode at a time
# Tokens are told in pieces of 100 by TensorRT-LLM's workers that decode (stream_interval of the recipes of dynamo, in
# github NVIDIA/srt-slurm), of 10 by the whole engines that ``sequence_s`` was set on: a tenth of the pieces.
_TOLD = {"trtllm": 0.1}


def figures(root: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Errors of TPOT, and of TTFT with few requests in flight; what was left out and why."""
    apart = split_points(root)
    points, left = closed_loops(serving_points(root), apart)
    told = [one for one in points if one.what == "TPOT" or one.groups["few"] == "yes"]
    whole, split = (
        [one for one in told if (one.groups["kind"] == "disaggregated") == apart] for apart in (False, True)
    )
    found = {"serving_points": by_group(whole)}
    found |= {f"serving_points_by_{by}": by_group(whole, by) for by in ("kind", "model", "stack", "gpu", "held_out")}
    found["disaggregated"] = by_group(split)
    found |= {f"disaggregated_by_{by}": by_group(split, by) for by in ("model", "stack", "gpu", "held_out")}
    found["disaggregated_static"] = by_group(static_points(apart)[0])
    answered = {"answered": sum(one.what == "TPOT" for one in whole), **dict(left.most_common())}
    found["points_answered"] = [{"points": count, "which": reason} for reason, count in answered.items()]
    found["rows_not_usable"] = [{"rows": count, "rule": rule} for rule, count in left_out(root).items()]
    return found


def closed_loops(points: Iterable[ServingPoint], split: Iterable[SplitPoint] = (), stacks: Stacks = stack,
                 tables: Tables | None = None) -> tuple[list[Compared], Counter[str]]:  # fmt: skip
    """TTFT and TPOT of each point; why others are left out. ``held_out``: every second point, which the hosts' times in
    ``stacks/`` were not set on."""
    left: Counter[str] = Counter()
    shared, found = tables or tables_for(), []
    known: dict[Any, Deployment] = {}
    asked: list[ServingPoint | SplitPoint] = [*points, *split]
    for at, point in enumerate(asked):
        whole = point.decode if isinstance(point, SplitPoint) else point
        try:
            result = simulate(_loop_service(point, stacks, known), _loop(whole), intervals=False, tables=shared)
        except KernelcastError as error:
            left[str(error).split(";")[0].split(":")[0]] += 1
            continue
        if whole.running < _ADMITTED * whole.concurrency and _running(result) > _ADMITTED * whole.concurrency:
            left["its engine held fewer requests than were sent, by a limit that the table does not tell"] += 1
            continue
        groups = {
            "kind": "disaggregated" if isinstance(point, SplitPoint) else _kind(whole.model), "stack": whole.stack,
            "model": whole.model, "held_out": "yes" if at % 2 else "no",
            "few": "yes" if whole.concurrency <= FEW else "no", "id": whole.id, "gpu": whole.gpu,
        }  # fmt: skip
        metrics = result.metrics
        found.append(Compared("TPOT", whole.tpot_s, metrics["mean_tpot_ms"] / 1e3, groups))
        found.append(Compared("TTFT", whole.ttft_s, metrics["mean_ttft_ms"] / 1e3, groups))
    return found, left


def _running(result: Simulation) -> float:
    """Requests that decode at a time."""
    served = result.served
    share = (served.last_token_s - served.first_token_s).sum() / served.e2el_s.sum()
    return float(result.load.max_concurrency * share)


def _kind(name: str) -> str:
    return "dense" if any(word in name for word in ("Llama", "Qwen3-32B")) else "experts"


def _loop(point: ServingPoint) -> Load:
    count = max(4 * point.concurrency, min(_ASKED * point.concurrency, _MOST))
    drawn = np.random.default_rng(0)
    shortest = 0.8 if point.public else 1.0
    inputs, outputs = (
        drawn.integers(int(shortest * tokens), tokens + 1, count)
        for tokens in (point.input_tokens, point.output_tokens)
    )
    return Load(np.zeros(count), inputs, outputs, max_concurrency=point.concurrency)


def _loop_service(point: ServingPoint | SplitPoint, stacks: Stacks, known: dict[Any, Deployment]) -> Service:
    if isinstance(point, SplitPoint):
        decode = replace(_loop_pool(point.decode, stacks, known, apart=True), replicas=point.decode_workers)
        prefill = replace(_loop_pool(point.prefill, stacks, known), replicas=point.prefill_workers)
        return Service(decode, prefill, "least_loaded", guesses_of(point.decode, decode.deployment))
    pool = _loop_pool(point, stacks, known)
    return Service(pool, speculation=guesses_of(point, pool.deployment))


def _loop_pool(point: ServingPoint, stacks: Stacks, known: dict[Any, Deployment], apart: bool = False) -> Pool:
    """``apart``: it decodes alone."""
    key = (
        apart,
        point.gpu,
        point.stack,
        point.model,
        point.tp,
        point.pp,
        point.dp,
        point.moe_ep,
        point.weights,
        point.experts,
    )
    if key not in known:  # of one object, whose step times are shared
        found = deployment_of(point)
        engine = replace(stacks(point.stack), moe_backend=found.stack.moe_backend)
        if apart and point.public:
            engine = replace(engine, sequence_s=engine.sequence_s * _TOLD.get(point.stack, 1.0))
        known[key] = replace(found, stack=engine)
    limits: dict[str, Any] = {"chunked_prefill": True}
    place = known[key]
    if point.public and point.stack == "sglang":  # InferenceX's recipes
        limits |= {"recv_interval": 30 if point.concurrency >= _RECV_FROM else 10, "max_num_batched_tokens": 32768,
                   "max_prefill_tokens": 32768, "max_num_seqs": max(128, point.concurrency)}  # fmt: skip
    if point.public and point.stack == "trtllm":
        tokens = (1 + point.draft_tokens) * max(1, point.concurrency // point.dp) + point.input_tokens + 64
        limits |= {"max_num_batched_tokens": -(-tokens // 64) * 64, "dp_wait": _DP_WAIT}
    if not point.public and point.stack != "sglang":
        limits["max_num_batched_tokens"] = max(2048, point.input_tokens + point.concurrency)
    return Pool(place, settings_of(place, limits, point.input_tokens + point.output_tokens // 2))
