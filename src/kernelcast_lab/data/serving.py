"""Whole models as they were served: measured cases of PipeWeave and measured serving points of AIConfigurator.

Both come as tables in a folder of data, as ``shared.read_rows`` finds them:

- ``pipeweave/e2e_real`` and ``workloads``: one static batch a case, run up to five times -> ``served_cases``.
  ``pipeweave/e2e_pred``: what five methods predicted for the same cases -> ``published_errors``.
- ``aiconfigurator/e2e_silicon``: engines under a closed loop of requests -> ``serving_points``. The table has no
  predictions, no format of the KV cache, no shared prefix and no speculative decoding.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import gpu
from kernelcast_lab.data.inferencex import UNKNOWN, draft_tokens_of
from kernelcast_lab.data.shared import read_rows

Row = Mapping[str, Any]
CaseKey = tuple[str, str, str, str, int, int]  # gpu, stack, model, workload, tp, pp
Group = Literal["gpu", "stack", "model", "workload", "tp"]

_SIZES = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
_FORMATS = {"nvfp4": "nvfp4", "fp8": "fp8", "fp8_block": "fp8_block", "int4_wo": "int4"}
_DUMP = re.compile(r"^(db-dump/|source_file=\d{4}-\d\d-\d\d\.csv)")  # exports of one public benchmark database
_NODE_GPUS = 8
_RACK = {"gb200"}  # one NVLink domain beyond a node
_TRAY_GPUS = 4  # of it


@dataclass(frozen=True)
class ServedCase:
    """One static batch on one deployment; times are medians over the runs, each quantity by itself.

    ``requests``: (input tokens, output tokens). Every request of a batch has the same output: the prefill gives the
    first token, ``steps`` = output tokens - 1 decode steps of the whole batch give the rest, step i (from 1) with
    input + i tokens in the cache. ``total_s`` is all of it, from the start of the prefill. In each SGLang run
    decode = total - prefill; ``decode_step_mean_s`` is that over ``steps``, ``decode_step_median_s`` the run's own
    median step. vLLM runs have a total only: None for the rest. The first of five runs has slow first decode steps
    (mean up to 1.44 times the median, later runs 0.99 to 1.02): a case with one run is to be read by its median step.
    """

    source: str
    gpu: str
    stack: str
    model: str
    workload: str
    tp: int
    pp: int
    requests: tuple[tuple[int, int], ...]
    steps: int
    runs: int
    total_s: float
    prefill_s: float | None
    decode_s: float | None
    decode_step_mean_s: float | None
    decode_step_median_s: float | None

    @property
    def key(self) -> CaseKey:
        return (self.gpu, self.stack, self.model, self.workload, self.tp, self.pp)

    @property
    def input_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.requests)


@dataclass(frozen=True)
class ServingPoint:
    """One engine (no disaggregation) that holds ``concurrency`` requests in flight.

    ``concurrency`` is of the whole engine, ``batch`` = concurrency / dp of one attention-DP rank. An engine has
    tp x dp GPUs (pp is 1 throughout): attention is sharded by tp in each of dp ranks, experts by moe_tp x moe_ep = tp x
    dp; both are None where the source does not fill them (dense models). ``weights`` and ``experts``: format of linear
    layers and of experts; a row without one is served as its checkpoint is, in bf16. ``ttft_s`` has the queue in it,
    and ``tpot_s`` the prefills that ran between decode steps. ``version``: None where the source has none.
    """

    source: str
    id: str
    gpu: str
    stack: str
    version: str | None
    model: str
    tp: int
    pp: int
    dp: int
    moe_tp: int | None
    moe_ep: int | None
    weights: str
    experts: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    batch: int
    ttft_s: float
    tpot_s: float
    public: bool = False  # of InferenceX, whose benchmark draws lengths from 0.8 to 1 of the nominal ones
    draft_tokens: int = 0  # of a step (multi-token prediction), by InferenceX's public recipes

    @property
    def running(self) -> float:
        """Requests that decode at a time, by Little's law: far below ``concurrency`` where an engine lets few in."""
        decode_s = (self.output_tokens - 1) * self.tpot_s
        return self.concurrency * decode_s / (self.ttft_s + decode_s)


# --- PipeWeave


def served_cases(folder: Path | str | None = None) -> list[ServedCase]:
    """The measured cases, one a (GPU, stack, model, workload, TP, PP), in that order."""
    requests: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in sorted(read_rows(folder, "pipeweave/workloads"), key=lambda r: (r["workload"], r["request"])):
        requests[row["workload"]].append((int(row["num_prefill_tokens"]), int(row["output_tokens"])))
    runs: dict[CaseKey, list[Row]] = defaultdict(list)
    for row in read_rows(folder, "pipeweave/e2e_real"):
        runs[_key(row)].append(row)
    return [_case(key, rows, _workload(key, requests)) for key, rows in sorted(runs.items())]


def _key(row: Row) -> CaseKey:
    return (gpu(row["gpu"]).id, row["serving"], row["model"], row["workload"], int(row["tp"]), int(row["pp"]))


def _workload(key: CaseKey, requests: Mapping[str, list[tuple[int, int]]]) -> tuple[tuple[int, int], ...]:
    """The requests of a case; those of vLLM runs (all alike) stand under a name with the stack before it."""
    stack, name = key[1], key[3]
    result = requests.get(name) or requests.get(f"{stack}_{name}")
    if result is None:
        raise unknown("workload", name, requests)
    if len({output for _, output in result}) != 1:
        raise KernelcastError(f"workload {name}: its requests differ in output_tokens; a static batch has one number")
    return tuple(result)


def _case(key: CaseKey, rows: list[Row], requests: tuple[tuple[int, int], ...]) -> ServedCase:
    outputs = requests[0][1]
    tokens = [n for n, _ in requests]
    facts = {
        "batch_size": len(requests),
        "input_len": max(tokens),
        "output_len": outputs,
        "total_prefill_tokens": sum(tokens),
        "total_decode_tokens": len(requests) * outputs,
    }
    message = " ".join(map(str, key))
    for row, (name, expected) in itertools.product(rows, facts.items()):
        if row[name] not in (None, expected):
            raise KernelcastError(f"{message}: {name} is {row[name]:g}, its workload has {expected}")
    steps = outputs - 1
    split = [row for row in rows if row["prefill_latency"] is not None]
    decode_s = _median(row["total_latency"] - row["prefill_latency"] for row in split)
    total_s = _median(row["total_latency"] for row in rows)
    if total_s is None or steps < 1:
        raise KernelcastError(f"{message}: no total_latency, or no decode step")
    return ServedCase(
        "pipeweave",
        *key,
        requests=requests,
        steps=steps,
        runs=len(rows),
        total_s=total_s,
        prefill_s=_median(row["prefill_latency"] for row in split),
        decode_s=decode_s,
        decode_step_mean_s=None if decode_s is None else decode_s / steps,
        decode_step_median_s=_median(row["median_decode_latency"] for row in rows),
    )


def _median(values: Iterable[float | None]) -> float | None:
    given = [v for v in values if v is not None]
    return statistics.median(given) if given else None


def published_errors(
    folder: Path | str | None = None, method: str = "pipeweave", by: Group | None = None
) -> dict[str, dict[str, float]]:
    """Mean error in % of total_s, prefill_s and decode_step_mean_s, for each value of ``by`` ('all' without it).

    Against the median run. The paper's own tables take, for each case, the run nearest to the prediction: PipeWeave
    has 8.2 on the prefill there, 8.9 here; the total is 7.7 there and 8.2 here.
    """
    rows = read_rows(folder, "pipeweave/e2e_pred")
    predicted = {_key(row): row for row in rows if row["method"] == method}
    if not predicted:
        raise unknown("method", method, {row["method"] for row in rows})
    columns = {"total_s": "total_ms", "prefill_s": "prefill_ms", "decode_step_mean_s": "decode_avg_ms"}
    errors: dict[str, dict[str, list[float]]] = {}
    for case in served_cases(folder):
        if case.key not in predicted:
            continue
        group = errors.setdefault("all" if by is None else str(getattr(case, by)), {})
        for name, column in columns.items():
            measured_s = getattr(case, name)
            if measured_s is not None:
                error = abs(predicted[case.key][column] / 1e3 / measured_s - 1)
                group.setdefault(name, []).append(100 * error)
    return {g: {n: statistics.fmean(v) for n, v in names.items()} for g, names in sorted(errors.items())}


# --- AIConfigurator


def concurrency(row: Row) -> int | None:
    """Requests in flight, as the notes on the source of a row say; None where they do not."""
    match = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"] or "")
    return int(match.group(1)) if match else None


def why_unusable(row: Row) -> str | None:
    """The rule that keeps a row of e2e_silicon out of ``serving_points``; None when it is in.

    - disaggregated: prefill and decode on different engines.
    - no_parallel_sizes, no_time, no_concurrency: nothing to predict from, or nothing to compare with.
    - several_replicas: concurrency is not batch x dp, so that a router stood before more than one engine.
    - multiplied_sizes: in exports of the benchmark database tp (or dp) is the product of the true tp and ep. The same
      measurements with the true sizes are in an older export (tp 8, moe 1 x 8 became tp 64, moe 8 x 8). Rows of
      these exports with tp = dp are taken for the same; no second copy shows it.
    - odd_gpus: tp x dp is no power of two, as no model's heads divide (GPUs of a whole rack as one tp).
    - beyond_a_node: more GPUs than one node links.
    - experts_disagree: moe_tp x moe_ep is not tp x dp, though filled; attention DP is not in the row.
    - unknown_format: a quantisation that has no name here.
    And of ``serving_points``: guesses_untold: of a sweep with speculative decoding and without, and nothing says which.
    """
    tp, _, dp, moe_tp, moe_ep = (int(row[name] or 1) for name in _SIZES)
    world = tp * dp
    multiplied = moe_ep > 1 and (moe_tp > 1 or tp == dp)
    rules = {
        "disaggregated": row["mode"] != "agg",
        "no_parallel_sizes": row["tp_size"] is None or row["batch_size"] is None,
        "no_time": not all((row[name] or 0) > 0 for name in ("silicon_ttft_ms", "silicon_tpot_ms")),
        "no_concurrency": concurrency(row) is None,
        "several_replicas": concurrency(row) != (row["batch_size"] or 0) * dp,
        "multiplied_sizes": multiplied and bool(_DUMP.match(row["silicon_data_source"] or "")),
        "odd_gpus": world & (world - 1) != 0,
        "beyond_a_node": world > _NODE_GPUS and row["system"] not in _RACK,
        "experts_disagree": moe_tp * moe_ep not in (1, world),
        "unknown_format": any(row[n] not in (None, *_FORMATS) for n in ("gemm_quant_mode", "moe_quant_mode")),
    }
    return next((rule for rule, holds in rules.items() if holds), None)


def serving_points(folder: Path | str | None = None) -> list[ServingPoint]:
    """The usable rows, each measurement once."""
    return _points(folder)[0]


def left_out(folder: Path | str | None = None) -> dict[str, int]:
    """How many rows each rule of ``why_unusable`` took, and how many were ``repeated`` from another export."""
    return dict(_points(folder)[1].most_common())


def _points(folder: Path | str | None) -> tuple[list[ServingPoint], Counter[str]]:
    taken: Counter[str] = Counter()
    points: dict[tuple[Any, ...], ServingPoint] = {}
    rows = read_rows(folder, "aiconfigurator/e2e_silicon")
    for row, draft_tokens in zip(rows, draft_tokens_of(rows), strict=True):
        rule = why_unusable(row) or ("guesses_untold" if draft_tokens == UNKNOWN else None)
        if rule is not None:
            taken[rule] += 1
            continue
        point = replace(_point(row, concurrency(row) or 0), draft_tokens=draft_tokens)
        # Another export has other digits at the end, sometimes milliseconds rounded to two, and calls R1 V3.
        model = point.model.replace("DeepSeek-V3", "DeepSeek-R1")
        same = (point.gpu, point.stack, model, point.weights, point.tp, point.dp, point.moe_ep or 1)
        lengths = (point.input_tokens, point.output_tokens, point.concurrency)
        key = (*same, *lengths, round(point.ttft_s * 1e3), round(point.tpot_s * 1e3, 1))
        taken["repeated"] += key in points
        points.setdefault(key, point)
    return list(points.values()), +taken


def _point(row: Row, in_flight: int) -> ServingPoint:
    tp, pp, dp = (int(row[name] or 1) for name in _SIZES[:3])
    moe_tp, moe_ep = (int(row[name]) if row[name] else None for name in _SIZES[3:])
    return ServingPoint(
        source="aiconfigurator",
        id=row["id"],
        gpu=gpu(row["system"]).id,
        stack=row["backend"],
        version=row["backend_version"],
        model=row["model_path"],
        tp=tp,
        pp=pp,
        dp=dp,
        moe_tp=moe_tp,
        moe_ep=moe_ep,
        weights=_FORMATS.get(row["gemm_quant_mode"], "bf16"),
        experts=_FORMATS.get(row["moe_quant_mode"], "bf16"),
        input_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        concurrency=in_flight,
        batch=int(row["batch_size"]),
        ttft_s=row["silicon_ttft_ms"] / 1e3,
        tpot_s=row["silicon_tpot_ms"] / 1e3,
        public=bool(_DUMP.match(row["silicon_data_source"] or "")),
    )


@dataclass(frozen=True)
class SplitPoint:
    """A closed loop on disaggregated engines: ``decode`` with all requests, and ``prefill`` of the same model; so many
    workers of each."""

    decode: ServingPoint
    prefill: ServingPoint
    decode_workers: int
    prefill_workers: int


def split_points(folder: Path | str | None = None) -> list[SplitPoint]:
    """Disaggregated rows with the number and layout of the workers, whose requests in flight are what they hold (others
    multiply sizes, or leave workers out)."""
    results = []
    rows = read_rows(folder, "aiconfigurator/e2e_silicon")
    for row, draft_tokens in zip(rows, draft_tokens_of(rows), strict=True):
        if (
            draft_tokens == UNKNOWN
            or row["mode"] != "disagg"
            or not all((row[f"silicon_{name}_ms"] or 0) > 0 for name in ("ttft", "tpot"))
        ):
            continue
        in_flight = concurrency(row)
        workers = [int(row[f"{part}_num_workers"] or 0) for part in ("decode", "prefill")]
        held = workers[0] * int(row["decode_batch_size"] or 0) * int(row["decode_attention_dp_size"] or 1)
        if in_flight is None or not all(workers) or held != in_flight:
            continue
        parts = [_point({**row, "batch_size": row[f"{part}_batch_size"] or 1,
                         **{name: row[f"{part}_{name}"] for name in _SIZES}}, in_flight)
                 for part in ("decode", "prefill")]  # fmt: skip
        parts = [as_recipes(part) for part in parts]
        if all((p.tp * p.dp) & (p.tp * p.dp - 1) == 0 for p in parts):
            results.append(SplitPoint(replace(parts[0], draft_tokens=draft_tokens), parts[1], workers[0], workers[1]))
    return results


def as_recipes(point: ServingPoint) -> ServingPoint:
    """A worker of SGLang in a rack with the layout of its recipe (github NVIDIA/srt-slurm, recipes/gb200-fp4 and -fp8):
    the export of one run says attention DP throughout, with tensor parallel experts, which no recipe has. Workers of
    one tray are tensor parallel throughout; wider ones have expert parallelism."""
    sharded_experts = point.dp > 1 and (point.moe_ep or 1) == 1
    if not (sharded_experts and point.public and point.stack == "sglang" and point.gpu in _RACK):
        return point
    if point.dp <= _TRAY_GPUS:
        return replace(point, tp=point.dp, dp=1, batch=point.batch * point.dp)
    return replace(point, moe_tp=1, moe_ep=point.dp)
