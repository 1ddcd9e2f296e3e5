"""Peak memory that a training job allocates on a rank of each pipeline stage, by part.

What a rank holds all the time: parameters, their fp32 copy, gradients and optimizer state, each divided by what shards
it (tensor and expert parallelism, ZeRO or FSDP over the data and context parallel ranks). On top, at the worst moment
of the schedule: activations of the micro-batches in flight (``saved_tensors.py``), the gradients of the layer whose
backward pass runs, logits, buffers of communication and workspaces. Parts are those of that one moment, so they add up
to the peak, which is what ``torch.cuda.max_memory_allocated`` says; context, NCCL and fragments are ``reserved_bytes``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kernelcast.errors import DoesNotFit
from kernelcast.hardware.gpu import TCGEN05
from kernelcast.models.layers import Experts, Layer
from kernelcast.ops.dtypes import find_dtype
from kernelcast.schedule import Memory
from kernelcast.training.job import LORA_TARGETS, TrainingJob
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.rank_weights import Weights, layer_runs, layer_weights
from kernelcast.training.saved_tensors import Sharded, head_steps, joining_steps, kept, layer_steps, most_alive

PARTS = {
    "parameters": "weights as products read them, quantised copies, and whole ones that FSDP has gathered",
    "main_parameters": "the fp32 copy that the optimizer updates",
    "gradients": "as they are accumulated",
    "optimizer": "moments",
    "activations": "of the micro-batches in flight, and the gradients of the layer that runs",
    "logits": "of the last product and the loss",
    "communication": "buffers between stages, and of gradients on their way",
    "workspace": "of matrix products and weight gradients before they are added",
}
_Key = tuple[tuple[tuple[int, int], ...], bool, bool]  # layers of a part, whether it embeds, whether it is the last
Counts = npt.NDArray[np.int64]
# PyTorch's cuBLAS workspace on Hopper and later (CUDA semantics: :4096:2:16:8 is 8 MiB before, 32 MiB since), and the
# 32 MiB that Transformer Engine allocates of its own
_WORKSPACE = 2 * 32 * 2**20
_ADAM8BIT = 2 * (1 + 4 / 256)  # bitsandbytes: two 8-bit moments with an fp32 scale for 256
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # QLoRA: an 8-bit scale for 64 weights, an fp32 one for 256 of those


@dataclass(frozen=True)
class TrainingMemory:
    """Of each stage, in order; ``parts``, ``peak_bytes`` and ``fits`` are those of the fullest."""

    stages: tuple[Memory, ...]
    reserved_bytes: float  # beside what is allocated: context, NCCL, fragments

    @property
    def fullest(self) -> Memory:
        return max(self.stages, key=lambda stage: stage.used_bytes)

    @property
    def parts(self) -> Mapping[str, float]:
        return self.fullest.parts

    @property
    def peak_bytes(self) -> float:
        return float(self.fullest.used_bytes)

    @property
    def missing_bytes(self) -> float:
        return float(self.fullest.missing_bytes)

    @property
    def fits(self) -> bool:
        return bool(self.fullest.fits)


@dataclass(frozen=True)
class _Part:
    """A part of the model on a rank. Bytes of one micro-batch: ``kept`` between its passes, ``backward`` at the peak of
    its layers' backward pass; beside what is kept, ``loss`` while the loss runs and ``head`` in the backward pass of
    the product before it."""

    weights: Weights
    kept: float
    backward: float
    embeds: bool
    loss: float = 0.0
    head: float = 0.0


def _segments(runs: Iterable[tuple[int, Layer]], at: Iterable[int]) -> Iterator[tuple[int, int, Layer]]:
    """Runs of equal layers split at these places: first layer, count, layer."""
    first = 0
    for count, layer in runs:
        inside = sorted({first, first + count, *(place for place in at if first < place < first + count)})
        yield from ((start, end - start, layer) for start, end in itertools.pairwise(inside))
        first += count


def shape_of(job: TrainingJob) -> Sharded:
    """What decides the tensors that a rank keeps of a layer."""
    layout, precision, stack, lora = job.layout, job.precision, job.stack, job.lora
    element = find_dtype(precision.activations).act_bytes
    return Sharded(
        hidden=job.model.hidden, tp=layout.tp, sequence_parallel=layout.sequence_parallel, cp=layout.cp,
        cp_comm=layout.cp_comm, expert_tp=layout.expert_tp, element=element, linear=precision.saved_bytes,
        attention=min(element, find_dtype(precision.attention).act_bytes), busiest=_busiest(job),
        quantised=precision.saved_bytes != element, rank=lora.rank if lora else 0,
        trained=lora.targets if lora else LORA_TARGETS,
        fused_norms=stack.fused_norms or job.model.layers[0].layer.norms.op in dict(stack.saved),
        fused_activation=stack.fused_activation, saved=stack.saved,
        activation_input=(precision.activation_input_bytes or element) / element,
        masked="residual" in dict(stack.dropout).get(job.model.model_type, ""),
    )  # fmt: skip


class _Rank:
    """What all stages of a job share."""

    def __init__(self, job: TrainingJob) -> None:
        layout = job.layout
        self.job, self.shape = job, shape_of(job)
        self.element = self.shape.element
        self.modules = [run.layer for run in job.model.mtp_module for _ in range(run.count)] * job.model.mtp_layers
        self.modules = self.modules if job.mtp else []
        self.table = job.model.vocab / layout.tp * job.model.hidden  # numbers of the embedding, and of the head
        self.counts = job.part_layers
        self.runs = [layer_runs(job.model, end - count, end)
                     for count, end in zip(self.counts, itertools.accumulate(self.counts), strict=True)]  # fmt: skip
        last = len(self.counts) - 1
        self.keys: list[_Key] = [(tuple((count, id(layer)) for count, layer in runs), at == 0, at == last)
                                 for at, runs in enumerate(self.runs)]  # fmt: skip
        self.dense_ranks = layout.shards or layout.replicas  # that share one copy of what ZeRO shards
        self.expert_ranks = min(self.dense_ranks, layout.expert_replicas) if layout.shards else layout.expert_replicas
        self._parts: dict[_Key, _Part] = {}

    # ---- parts of the model

    def part(self, index: int) -> _Part:
        """Equal parts are counted once."""
        key = self.keys[index]
        if key not in self._parts:
            self._parts[key] = self._part(self.runs[index], *key[1:])
        return self._parts[key]

    def fullest(self) -> list[int]:
        """Stages of which one is the fullest: of those with equal parts the first, which holds most micro-batches."""
        layout, found = self.job.layout, dict[tuple[_Key, ...], int]()
        if layout.schedule == "dualpipe":
            return list(range(layout.pp))
        for stage in range(layout.pp):
            found.setdefault(tuple(self.keys[index] for index in stage_parts(layout, stage)), stage)
        return list(found.values())

    def _part(self, runs: tuple[tuple[int, Layer], ...], embeds: bool, ends: bool) -> _Part:
        """Layers that are recomputed (Megatron's block method) or offloaded come first; of the offloaded two are on the
        GPU, one that runs and one that is fetched."""
        recompute, layers = self.job.recompute, sum(count for count, _ in runs)
        block = recompute.method == "block"
        again = 0 if recompute.mode != "full" else min(recompute.layers or layers, layers) if block else layers
        group = max(1, recompute.layers) if recompute.mode == "full" and not block else 1
        named = recompute.modules if recompute.mode == "selective" else ()
        away = max(0, min(self.job.offload.activation_layers, layers) - 2)
        total, most, stream = 0.0, 0.0, self.shape.stream
        for first, count, layer in _segments(runs, (again, away)):
            steps = layer_steps(layer, self.shape)
            alive, each, together = most_alive(steps, stream), kept(steps, named), 0.0
            if first < again:  # the inputs of groups of layers are kept; a group that runs again is alive as a whole
                together = (min(group, count) - 1) * kept(steps)
                count, each = -(-count // group), stream
            each = 0.0 if first < away else each
            most = max(most, total + (count - 1) * each + together + alive)
            total += count * each
        for layer in self.modules if ends else ():  # for multi-token prediction
            total += kept(joining_steps(self.shape))
            most = max(most, total + most_alive(layer_steps(layer, self.shape), stream))
            total += kept(layer_steps(layer, self.shape), named)
        tokens = self.job.rank_tokens
        loss, head = self._logits() if ends else (0.0, 0.0)
        return _Part(self._weights(runs, embeds, ends), total * tokens, most * tokens, embeds, loss * tokens,
                     head * tokens)  # fmt: skip

    def _logits(self) -> tuple[float, float]:
        """While the loss runs, and while the product before it does; losses of further tokens wait for their turn."""
        fused = self.job.stack.fused_cross_entropy
        steps = head_steps(self.job.model.final_norm, self.shape, self.job.model.vocab / self.shape.tp, fused,
                           4.0 if self.job.model.kind == "decoder" else self.element)  # fmt: skip
        waiting = len(self.modules) * kept(steps)
        return most_alive(steps, 0.0) + waiting, most_alive(steps[:-1], 0.0) + waiting

    def _weights(self, runs: tuple[tuple[int, Layer], ...], embeds: bool, ends: bool) -> Weights:
        job, layout = self.job, self.job.layout
        lora = (job.lora.rank, job.lora.targets) if job.lora else (0, ())
        found = [(count, layer_weights(layer, job.model.hidden, layout.tp, layout.ep, layout.expert_tp, *lora))
                 for count, layer in (*runs, *((1, layer) for layer in self.modules if ends))]  # fmt: skip
        outside = 0.0
        if ends and self.modules:  # two norms and a product each; the first stage's embedding once more
            hidden = job.model.hidden
            outside += len(self.modules) * (2 * hidden * hidden / layout.tp + 2 * hidden)
            outside += self.table if len(self.counts) > 1 else 0.0
        if embeds:
            outside += self.table + job.model.hidden * (job.model.learned_positions + job.model.token_types)
        if ends:
            again = self.table if job.model.tied_embeddings and job.model.head == "lm" and len(self.counts) > 1 else 0.0
            outside += job.model.hidden + (job.model.parameters.head / layout.tp or again)
        return Weights(
            dense=outside + sum(count * each.dense for count, each in found),
            experts=sum(count * each.experts for count, each in found),
            products=sum(count * each.products for count, each in found),
            shapes=tuple(sorted({shape for _, each in found for shape in each.shapes})),
            adapters=sum(count * each.adapters for count, each in found),
            unit=max([outside, *(each.total for _, each in found)]),
        )

    # ---- a stage

    def stage(self, stage: int) -> Memory:
        """The worst of three kinds of moments: a layer's backward pass or the loss, and the optimizer's step."""
        parts = [self.part(index) for index in stage_parts(self.job.layout, stage)]
        weights = [part.weights for part in parts]
        always = self._always(weights) | {"activations": 0.0, "logits": 0.0, "communication": 0.0}
        always["workspace"] = _WORKSPACE + self._wgrads(weights)
        moments = [always | moment for moment in self._moments(stage, parts)]
        moments.append(always | {"gradients": always["gradients"] + self._cast_gradients(weights)})
        worst = max(moments, key=lambda moment: sum(moment.values()))
        gpu_bytes = self.job.gpu.dram_bytes
        return Memory({name: worst[name] for name in PARTS}, gpu_bytes, gpu_bytes - self.job.reserved_bytes)

    def _moments(self, stage: int, parts: Sequence[_Part]) -> Iterator[dict[str, float]]:
        job, layout = self.job, self.job.layout
        passes, running = held(layout, stage)
        each = np.array([part.kept for part in parts])
        others = passes @ each - each[running]
        stream = job.rank_tokens * self.shape.stream
        buffers = stream if layout.virtual_stages > 1 else 0.0  # received while another part runs
        buffers += job.rank_tokens * self.shape.whole if layout.tp > 1 and layout.sequence_parallel else 0.0  # gathered
        buffers += self._gathered([part.weights for part in parts])
        wgrads = self._wgrads([part.weights for part in parts])
        table = 0.0 if job.lora or layout.zero == 3 else self.table * self.element  # its gradient, as it is made
        # before the first backward pass there are none, where a framework has no buffer for them
        before = {"gradients": 0.0} if layout.micro_batches == 1 and not job.stack.fused_gradient_accumulation else {}
        for index, part in enumerate(parts):
            if not np.any(running == index):
                continue
            most = float(others[running == index].max())
            here = {"communication": buffers, "workspace": _WORKSPACE + wgrads}
            yield here | before | {"activations": most + part.backward}
            yield here | {"activations": most, "workspace": here["workspace"] + table * part.embeds}
            if part.loss:
                ends = here | before | {"activations": most + part.kept}
                yield ends | {"logits": part.loss}
                yield ends | {"logits": part.head, "workspace": here["workspace"] + table}

    def _always(self, weights: Sequence[Weights]) -> dict[str, float]:
        """Parameters, their copies, gradients and states. FSDP (ZeRO-3) shards the fp32 parameters, and keeps no others
        beside what it has gathered."""
        job, precision, zero = self.job, self.job.precision, self.job.layout.zero
        held_main, states = precision.main_parameter_bytes, self._state_bytes()
        frozen = job.lora is not None
        whole = _sum(weights, "dense", "experts")
        trained = _sum(weights, "adapters") if frozen else whole
        sharded_trained = self._per_rank(weights, frozen)
        plain, products = precision.parameter_bytes, _sum(weights, "products")
        numbers = products * self._product_bytes() + (whole - products) * plain
        if frozen:
            share = self._per_rank(weights, False) / whole if zero == 3 else 1.0
            parameters = numbers * share + (sharded_trained if zero == 3 else trained) * plain
        elif zero == 3:
            parameters = 0.0 if held_main else sharded_trained * plain
        else:
            parameters = numbers
        on_gpu = 0.0 if job.offload.optimizer else (sharded_trained if zero else trained)
        return {
            "parameters": parameters,
            "main_parameters": on_gpu * held_main,
            "gradients": (sharded_trained if zero >= 2 else trained) * precision.gradient_bytes,
            "optimizer": on_gpu * states,
        }

    def _product_bytes(self) -> float:
        """Of a weight of a linear layer: as stored, and quantised copies in both layouts; no more than those where fp8
        parameters are gathered (--fp8-param-gather). Products of Blackwell read fp8 tensors with one scale in either
        layout, so one copy is enough (Transformer Engine, is_non_tn_fp8_gemm_supported). A quantised base of adapters
        is transposed when it is read (Megatron's disable_parameter_transpose_cache)."""
        job, precision = self.job, self.job.precision
        copies = precision.weight_copies
        if precision.scaling in ("delayed", "current") and job.gpu.instruction_path == TCGEN05:
            copies /= 2
        base = job.lora.base if job.lora else ""
        if base:
            return _NF4 if base == "int4" else find_dtype(base).weight_bytes
        gathered = copies and precision.gather_bytes < precision.parameter_bytes
        return copies if gathered else precision.parameter_bytes + copies

    def _per_rank(self, weights: Sequence[Weights], adapters: bool) -> float:
        """Numbers of a shard."""
        if adapters:
            return _sum(weights, "adapters") / self.dense_ranks
        return _sum(weights, "dense") / self.dense_ranks + _sum(weights, "experts") / self.expert_ranks

    def _state_bytes(self) -> float:
        """Of both moments of Adam, or the one of Muon (of matrices; the rest is few) and of SGD with momentum."""
        both = self.job.precision.state_bytes
        one = {"adamw8bit": _ADAM8BIT, "muon": both / 2, "sgd_momentum": both / 2, "sgd": 0.0}
        return one.get(self.job.optimizer, both)

    def _cast_gradients(self, weights: Sequence[Weights]) -> float:
        """The optimizer casts 16-bit gradients to fp32 for its fp32 parameters, a shard of them."""
        precision, frozen = self.job.precision, self.job.lora is not None
        if precision.gradient_bytes >= 4 or not precision.main_parameter_bytes or self.job.offload.optimizer:
            return 0.0
        trained = _sum(weights, "adapters") if frozen else _sum(weights, "dense", "experts")
        return 4.0 * (self._per_rank(weights, frozen) if self.job.layout.zero else trained)

    def _wgrads(self, weights: Sequence[Weights]) -> float:
        """Where products add to the gradient in place, Transformer Engine still returns a tensor of each shape, which
        it makes once (get_dummy_wgrad). Else the gradient of the largest matrix is alive until it is added; with FSDP
        those of its unit (``_gathered``)."""
        shapes = {shape for each in weights for shape in each.shapes}
        if self.job.lora or not shapes or self.job.layout.zero == 3:
            return 0.0
        return self.element * (sum(shapes) if self.job.stack.fused_gradient_accumulation else max(shapes))

    def _gathered(self, weights: Sequence[Weights]) -> float:
        """FSDP: the parameters of the unit that runs and of the next, and its gradients before and while they are
        reduced. In a pipeline all stay gathered, and gradients are reduced after the last micro-batch (torchtitan:
        reshard_after_forward and requires_gradient_sync are off)."""
        precision, unit = self.job.precision, max(each.unit for each in weights)
        if self.job.layout.zero != 3:
            return 0.0
        grads = 0.0 if self.job.lora else self.element + precision.reduce_bytes
        if self.job.layout.pp == 1:
            return unit * (2 * precision.gather_bytes + grads)
        whole, trained = _sum(weights, "dense", "experts"), 0.0 if self.job.lora else precision.reduce_bytes
        return whole * (precision.gather_bytes + trained) + unit * grads


def _busiest(job: TrainingJob) -> float:
    """Tokens of the busiest rank's experts over the mean."""
    blocks = (run.layer.mlp for run in job.model.distinct_layers)
    return max((job.imbalance(block) for block in blocks if isinstance(block, Experts)), default=1.0)


def _sum(weights: Sequence[Weights], *names: str) -> float:
    return float(sum(getattr(each, name) for each in weights for name in names))


# ---- schedules


def stage_parts(layout: TrainingLayout, stage: int) -> list[int]:
    """Parts of the model on a stage. DualPipe runs micro-batches from both ends: each stage has the parts of two."""
    if layout.schedule == "dualpipe" and layout.pp > 1:
        return [stage, layout.pp - 1 - stage]
    return list(range(stage, layout.parts, layout.pp))


def held(layout: TrainingLayout, stage: int) -> tuple[Counts, Counts]:
    """While a stage's backward passes run, one row each: micro-batches of each of its parts that hold activations, the
    running one included; and which part runs.

    1F1B starts the first backward pass after stages - stage forward passes, the interleaved schedule after
    2 (stages - stage - 1) + (virtual - 1) stages + 1 passes of parts, ``stages`` micro-batches of one part after the
    other (Narayanan et al. 2021); GPipe after all. ZB-H1 holds what 1F1B does (Qi et al. 2023, section 3.1), DualPipe
    stages + 1 in two directions (DeepSeek-V3, arXiv 2412.19437, table 2).
    """
    stages, virtual, micro_batches = layout.pp, layout.virtual_stages, layout.micro_batches
    if layout.schedule == "dualpipe" and stages > 1:
        both = [min(stages - stage, micro_batches), min(stage + 1, micro_batches)]
        return np.array([both, both]), np.array([0, 1])
    passes = micro_batches * virtual
    first = stages - stage if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    if layout.schedule == "gpipe":
        first = passes
    done = np.arange(min(passes, virtual * stages))  # later ones repeat
    part = np.arange(virtual)

    def of_parts(tasks: Counts) -> Counts:
        cycles, rest = np.divmod(tasks[:, None], virtual * stages)
        return cycles * stages + np.clip(rest - part * stages, 0, stages)

    forward = of_parts(np.minimum(first + done, passes))
    backward = of_parts(done)[:, ::-1]
    return forward - backward, virtual - 1 - done % (virtual * stages) // stages


# ---- answers


def memory(job: TrainingJob) -> TrainingMemory:
    """Peak memory of a rank of each stage."""
    rank = _Rank(job)
    return TrainingMemory(tuple(rank.stage(stage) for stage in range(job.layout.pp)), job.reserved_bytes)


def peak(job: TrainingJob) -> TrainingMemory:
    """The same of the stages that can be the fullest alone: what a search needs."""
    rank = _Rank(job)
    return TrainingMemory(tuple(rank.stage(stage) for stage in rank.fullest()), job.reserved_bytes)


def least_bytes(job: TrainingJob) -> float:
    """What a rank holds all the time, the mean of the stages: some rank needs more, whatever its schedule, micro-batch
    and recomputation."""
    rank = _Rank(replace(job, layout=replace(job.layout, pp=1, schedule="1f1b", virtual_stages=1, stage_layers=None)))
    return sum(rank._always([rank.part(0).weights]).values()) / job.layout.pp


def check_fits(job: TrainingJob) -> TrainingMemory:
    """The memory of a job; one that does not fit is refused with what needs most."""
    needed = memory(job)
    if needed.fits:
        return needed
    named = ", ".join(f"{name.replace('_', ' ')} {size / 2**30:,.1f}" for name, size in needed.parts.items() if size)
    raise DoesNotFit(
        f"{job.model.name} with {job.layout.label} needs {needed.peak_bytes / 2**30:,.1f} GiB on a GPU ({named}), "
        f"{needed.missing_bytes / 2**30:,.1f} GiB more than {job.gpu.id} has beside the "
        f"{needed.reserved_bytes / 2**30:,.1f} GiB that the framework reserves; recompute, or larger tp, pp, cp or "
        "zero need less",
        needed,
    )
