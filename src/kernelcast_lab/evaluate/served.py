"""Whole models as they were served, against predictions.

PipeWeave's static batches (SGLang and vLLM), and AIConfigurator's serving points: engines that hold a number of
requests in flight. A point is predicted as a steady state. An engine that mixes prompts with decode steps replaces each
of the others once while one request writes its ``output_tokens``: a step carries ``requests / output_tokens`` of a
prefill. One that reads prompts first keeps requests of equal length in step with one another: they end together, the
next ones are read together, and each waits for those behind it, on the mean half of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.measured.errors import Errors
from kernelcast.networks import model
from kernelcast.networks.forward import Deployment
from kernelcast.networks.precision import Precision
from kernelcast.parallel import Layout
from kernelcast.serving.infer import infer_many
from kernelcast.serving.memory import largest_batch
from kernelcast.serving.workload import Workload
from kernelcast.stacks import stack
from kernelcast_lab.data.serving import ServedCase, ServingPoint, served_cases, serving_points

# The sources' names, where they are not names of the catalogue.
_MODELS = {
    "Qwen2.5-14B": "qwen2.5-14b", "Qwen3-32B": "qwen3-32b", "Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b", "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b", "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b", "openai/gpt-oss-120b": "gpt-oss-120b",
    "deepseek-ai/DeepSeek-R1": "deepseek-r1", "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "moonshotai/Kimi-K2.5": "kimi-k2",
}  # fmt: skip
SOURCES = ("pipeweave", "aiconfigurator")
_BLACKWELL = "10"
_ADMITTED = 0.5  # of the requests in flight, that decode at a time (by the measured times)
_FEW = 4  # requests in flight, among which a prompt seldom waits for another
_PROMPTS_WAIT = 1.3  # prompts that are read before a request's first token, its own with them
_CHUNK = 8192  # tokens of a prefill step, as engines set it


@dataclass(frozen=True)
class Compared:
    """One measured time beside its prediction, in seconds; ``groups`` are what errors are told by."""

    what: str
    measured_s: float
    predicted_s: float
    groups: Mapping[str, str]
    low_s: float | None = None  # the interval, where the time itself was predicted
    high_s: float | None = None

    @property
    def inside(self) -> bool | None:
        if self.low_s is None or self.high_s is None:
            return None
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def error(self) -> float:
        """In percent of the measured time; above 0: predicted too slow."""
        return (self.predicted_s / self.measured_s - 1) * 100


def static_batches(cases: Sequence[ServedCase]) -> list[Compared]:
    """Total, prefill and mean decode step of every case."""
    pairs = []
    for case in cases:
        inputs, outputs = (tuple(int(n) for n in column) for column in zip(*case.requests, strict=True))
        pairs.append((_case(case), Workload(inputs, outputs, chunk=0)))  # read in one pass, as it was measured
    found = []
    for case, result in zip(cases, infer_many(pairs), strict=True):
        groups = {"gpu": case.gpu, "stack": case.stack, "model": case.model}
        told = [("total", case.total_s, result.total)]
        if case.prefill_s is not None and case.decode_step_mean_s is not None:
            told += [("prefill", case.prefill_s, result.prefill), ("decode step", case.decode_step_mean_s, result.step)]
        for what, measured_s, span in told:
            found.append(Compared(what, measured_s, span.time_s, groups, span.low_s, span.high_s))
    return found


def _case(case: ServedCase) -> Deployment:
    layout = Layout(tp=case.tp, pp=case.pp)
    return Deployment(model(_MODELS[case.model]), gpu(case.gpu), stack(case.stack), Precision(), layout)


def steady_points(points: Sequence[ServingPoint]) -> tuple[list[Compared], Counter[str]]:
    """Time per output token (and to the first, where few run) of points that can be predicted; why others cannot."""
    left: Counter[str] = Counter()
    places, pairs = [], []
    for point in points:
        try:
            place = deployment_of(point)
            alone = Workload.equal(1, point.input_tokens, point.output_tokens, chunk=_CHUNK)
            if point.running < _ADMITTED * point.concurrency:
                raise KernelcastError("more than half of its requests wait: the batch is not what the table says")
            running = min(point.concurrency, largest_batch(place, alone))
            if not running:
                raise KernelcastError("does not fit")
        except KernelcastError as error:
            left[str(error).split(";")[0]] += 1
            continue
        middle = point.input_tokens + point.output_tokens // 2 - 2
        pairs += [(place, Workload.equal(1, point.input_tokens, 1, chunk=_CHUNK)),
                  (place, Workload.equal(running, middle, 2, cached=middle - 1))]  # fmt: skip
        places.append((point, running))
    results = infer_many(pairs)
    found = []
    for at, (point, running) in enumerate(places):
        prefill_s, step_s = results[2 * at].prefill.time_s, results[2 * at + 1].step.time_s
        groups = {"gpu": point.gpu, "stack": point.stack, "model": point.model, "weights": point.weights}
        share = 1.0 if stack(point.stack).mixed_steps else 0.5
        tpot_s = step_s + share * running / point.output_tokens * prefill_s
        found.append(Compared("TPOT", point.tpot_s, tpot_s, groups))
        if point.concurrency <= _FEW:
            ttft_s = _PROMPTS_WAIT * prefill_s + step_s + stack(point.stack).request_s
            found.append(Compared("TTFT, 1 to 4 requests", point.ttft_s, ttft_s, groups))
    return found, left


def deployment_of(point: ServingPoint) -> Deployment:
    """Where a point was served."""
    if point.model not in _MODELS:
        raise KernelcastError(f"{point.model} is not in the catalogue")
    place, name = gpu(point.gpu), _MODELS[point.model]
    layout = Layout(tp=point.tp, pp=point.pp, dp=point.dp, ep=point.moe_ep or 1)
    return Deployment(model(name), place, stack(point.stack), _precision(point, name, place.compute_capability), layout)


def _precision(point: ServingPoint, name: str, capability: str) -> Precision:
    """As the table says, but for what its labels leave out."""
    # NVIDIA's quantised checkpoints, which TensorRT-LLM serves, come with an fp8 KV cache; InferenceX's recipes for
    # quantised Llama give vLLM one.
    llama = point.stack == "vllm" and "Llama" in point.model and point.public
    cache = "fp8" if (point.stack == "trtllm" or llama) and point.weights != "bf16" else None
    if name == "gpt-oss-120b":  # mxfp4 experts, the rest bf16; the table calls it nvfp4 everywhere
        return Precision("bf16", cache, "nvfp4" if capability.startswith(_BLACKWELL) else "int4")
    if name == "kimi-k2" and point.weights == "int4":  # only its experts are
        return Precision("bf16", cache, "int4")
    if name == "qwen3-235b-a22b" and point.weights == "fp8":  # the published checkpoint has blocks of 128 x 128
        return Precision("fp8_block", cache)
    return Precision(point.weights, cache, point.experts)


def by_group(compared: Sequence[Compared], by: str | None = None) -> list[dict[str, Any]]:
    """Errors of each quantity, whole or by a group."""
    members: dict[tuple[str, str], list[Compared]] = {}
    for entry in compared:
        members.setdefault((entry.what, entry.groups[by] if by else ""), []).append(entry)
    lines = []
    for (what, name), entries in sorted(members.items()):
        errors = Errors.of([c.measured_s for c in entries], [c.predicted_s for c in entries])
        held = [entry.inside for entry in entries if entry.inside is not None]
        inside = {"inside": 100 * sum(held) / len(held)} if held else {}
        lines.append({"of": what, **({by: name} if by else {}), **asdict(errors), **inside})
    return lines


def figures(root: Path | None, sources: Sequence[str] = SOURCES) -> dict[str, list[dict[str, Any]]]:
    """Tables of errors, by source; every table is read before anything is predicted."""
    cases = served_cases(root) if "pipeweave" in sources else []
    measured = serving_points(root) if "aiconfigurator" in sources else []
    found = {}
    if cases:
        batches = static_batches(cases)
        found = {"static_batches": by_group(batches), "static_batches_by_gpu": by_group(batches, "gpu")}
    if measured:
        points, left = steady_points(measured)
        found["serving_points"] = by_group(points)
        found |= {f"serving_points_by_{by}": by_group(points, by) for by in ("model", "stack")}
        told = {"predicted": sum(c.what == "TPOT" for c in points), **dict(left.most_common())}
        found["points_told"] = [{"points": count, "which": reason} for reason, count in told.items()]
    return found
