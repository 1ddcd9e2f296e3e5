"""Workloads asked of one deployment and their answers, as columns: one entry a workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.kernels.work import Array
from kernelcast.networks.batch import Ints
from kernelcast.networks.forward import Deployment
from kernelcast.predict import host_scale
from kernelcast.serving.asked import Asked
from kernelcast.serving.laid import Laid
from kernelcast.serving.memory import cache_bytes, does_not_fit, needed, read_weight_bytes
from kernelcast.serving.passes import Pass
from kernelcast.serving.shares import Shares
from kernelcast.serving.steps import images_of, steps_of
from kernelcast.serving.workload import Workload
from kernelcast.timeline import Memory
from kernelcast.times import Gathered, TimeColumns, Times, refusal


class Answers:
    """Ask (make it), gather calls, and lay the passes out once their times are known. Times are (3, workloads): time,
    low, high; of a workload that ``refused`` names they are NaN."""

    def __init__(self, deployment: Deployment, workloads: Sequence[Workload]) -> None:
        self.deployment, self.workloads = deployment, workloads
        self.asked = Asked(workloads)
        self.memory = needed(deployment, self.asked)
        self.refused: dict[int, KernelcastError] = dict(self._refusals())
        self.kept = np.array([at for at in range(len(workloads)) if at not in self.refused], dtype=np.int64)
        self.steps = np.zeros(len(workloads), dtype=np.int64)
        self.laid: list[tuple[Laid, Ints]] = []  # passes, and the workload of each owner; the model's own first
        self.times: Times | None = None

    def _refusals(self) -> Iterator[tuple[int, KernelcastError]]:
        model, asked = self.deployment.model, self.asked
        encoder, fits = model.kind == "encoder", self.memory.fits
        outputs, longest = asked.most(asked.outputs), asked.most(asked.inputs + (0 if encoder else asked.outputs))
        for at in np.flatnonzero(~fits | (encoder & (outputs > 1)) | (longest > model.max_context)).tolist():
            if not fits[at]:
                yield at, does_not_fit(self.deployment, self.workloads[at], self.memory_of(at))
                continue
            why = f"a request of {longest[at]:,} tokens exceeds the context of {model.name}, {model.max_context:,}"
            if encoder and outputs[at] > 1:
                why = f"{model.name} is an encoder: it writes no tokens; give --output-len 1"
            yield at, KernelcastError(why)

    def gather(self, gathered: Gathered) -> None:
        """The passes of what is kept, and their calls."""
        steps = [steps_of(self.workloads[at]) for at in self.kept.tolist()]
        self.steps[self.kept] = [one.count for one in steps]
        self.order = dict(zip(self.kept.tolist(), (one.order for one in steps), strict=True))
        if not len(self.kept):
            return
        try:
            self.laid.append((Laid(self.deployment, steps, gathered), self.kept))
            own = dict(zip(self.kept.tolist(), steps, strict=True))
            for draft, members in self.asked.drafts():
                decoding = np.array([at for at in members.tolist() if self.steps[at]], dtype=np.int64)
                if len(decoding):
                    guessed = [own[at].drafted(int(self.asked.checked[at]) - 1) for at in decoding.tolist()]
                    self.laid.append((Laid(draft, guessed, gathered, "draft model"), decoding))
            for tower, seeing in self.asked.towers():
                read = np.array([at for at in seeing if at not in self.refused], dtype=np.int64)
                images = [images_of(self.workloads[at], tower) for at in read.tolist()]
                self.laid.append((Laid(tower, images, gathered, "images"), read))
        except KernelcastError as error:  # no kernel for a part of the model
            self.laid, self.refused = [], dict.fromkeys(range(len(self.workloads)), error) | self.refused

    def lay(self, found: TimeColumns, times: Times) -> None:
        self.times = times
        for passes, owners in self.laid:
            passes.lay(found, host_scale(times.conditions, passes.deployment.stack.id))
            for at in np.flatnonzero(np.isnan(passes.phase_s(False)[0] + passes.phase_s(True)[0])).tolist():
                if why := passes.refused(at):
                    self.refused.setdefault(int(owners[at]), KernelcastError(refusal(*why)))

    # ---- columns ----

    @cached_property
    def answered(self) -> NDArray[np.bool_]:
        return np.array([at not in self.refused for at in range(len(self.workloads))], dtype=bool)

    @cached_property
    def prefill_s(self) -> Array:
        return self._phase_s(False)

    @cached_property
    def decode_s(self) -> Array:
        return self._phase_s(True)

    def _phase_s(self, decode: bool) -> Array:
        found = np.zeros((3, len(self.workloads)))
        for passes, owners in self.laid:
            found[:, owners] += passes.phase_s(decode)
        found[:, ~self.answered] = np.nan
        return found

    @cached_property
    def total_s(self) -> Array:
        return self.prefill_s + self.decode_s

    @cached_property
    def step_s(self) -> Array:
        """The mean decode step; with speculation a step may give several tokens."""
        return self.decode_s / np.maximum(self.steps, 1)

    @cached_property
    def tpot_s(self) -> Array:
        """Mean time of an output token after the first."""
        return self.decode_s / np.maximum(self.asked.most(self.asked.outputs) - 1, 1)

    @cached_property
    def output_tokens(self) -> Array:
        return self.asked.total(self.asked.outputs)

    @cached_property
    def tokens_per_s(self) -> Array:
        return self.output_tokens / self.total_s[0]

    @cached_property
    def flops(self) -> Array:
        """2 for each weight that a token passes; attention's products left out, as MFU is mostly told."""
        model, asked = self.deployment.model, self.asked
        active = model.active_parameters
        per_token = 2.0 * (active.attention + active.mlp + active.experts)
        tokens = asked.total(asked.inputs - asked.cached + asked.outputs - 1)
        return per_token * tokens + 2.0 * model.hidden * model.vocab * self.output_tokens

    @cached_property
    def mfu(self) -> Array:
        """Of the peak of all GPUs, the share that the model's matrix products use over the whole time."""
        peak = self.deployment.layout.gpus * self.deployment.gpu.mfu_flops_per_s
        return self.flops / (self.total_s[0] * peak)

    @cached_property
    def decode_bytes(self) -> Array:
        """Weights and cache that one GPU reads in all decode steps. Every step reads the weights that its tokens use; a
        request's cache is read while it decodes."""
        asked, steps = self.asked, np.maximum(self.steps, 1)
        per_token = self.steps / np.maximum(asked.most(asked.outputs) - 1, 1)
        taking_part = (asked.outputs - 1) * per_token[asked.owner]  # steps of each request
        cache = asked.total(taking_part * cache_bytes(self.deployment, asked.inputs + asked.outputs // 2))
        tokens = asked.total(taking_part) / steps  # in a mean step
        return self.steps * read_weight_bytes(self.deployment, tokens * asked.checked) + cache

    @cached_property
    def bandwidth_use(self) -> Array:
        """Of DRAM's peak, the share that weights and cache use in the decode steps."""
        busy_s = np.where(self.decode_s[0] == 0, 1.0, self.decode_s[0])
        return self.decode_bytes / busy_s / self.deployment.gpu.dram_bytes_per_s

    @cached_property
    def shares(self) -> Shares:
        return Shares(len(self.workloads), self.laid)

    # ---- of one workload ----

    def memory_of(self, at: int) -> Memory:
        parts = {name: float(column[at]) for name, column in self.memory.parts.items()}
        return Memory(parts, self.memory.gpu_bytes, self.memory.available_bytes)

    def passes_of(self, at: int) -> tuple[Pass, ...]:
        """The prefill's, then decode's, then those of the draft model."""
        found: list[Pass] = []
        for passes, owners in self.laid:
            for own in np.flatnonzero(owners == at).tolist():
                found += passes.passes(own)
        return tuple(found)

    def mean_ttft_s(self, at: int) -> float:
        """Over requests: one whose prompt is read in an early pass need not wait for the others."""
        (passes, owners), *drafts = self.laid
        start = passes.starts[np.searchsorted(owners, at)]
        ends = np.cumsum(passes.spans_s[0, start + self.order[at]])
        drafted = sum(float(one.phase_s(False)[0, owners == at].sum()) for one, owners in drafts)
        return float(ends[self.workloads[at].first_tokens()].mean()) + drafted  # the draft model reads prompts too
