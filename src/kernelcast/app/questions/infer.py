"""How fast a language model runs, what takes the time, and whether it fits: one static batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from kernelcast.app.questions.cluster import ClusterChoice
from kernelcast.app.questions.drafts import DraftModel, speculation
from kernelcast.app.questions.shared import (
    CalibrationFile,
    Changes,
    GpuName,
    ModelName,
    PowerCap,
    Pp,
    PredictorName,
    SequenceParallel,
    Tp,
    WeightsFolder,
    chosen_conditions,
    chosen_gpu,
    chosen_model,
)
from kernelcast.app.questions.words import flag
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.hardware import Gpu
    from kernelcast.inference.deployment import Deployment
    from kernelcast.inference.infer import Inference
    from kernelcast.inference.workload import Speculation, Workload
    from kernelcast.models.architecture import Architecture

_USUAL = {"batch": 1, "input_len": 1024, "output_len": 128, "cached": 0}


@dataclass(frozen=True, kw_only=True)
class InferQuestion(ClusterChoice):
    """One static batch of requests; None: not given."""

    command: ClassVar[str] = "infer"

    model: ModelName
    gpu: GpuName = None
    stack: Annotated[str, flag("--stack", metavar="NAME", help="vllm, sglang, trtllm, torch")] = "vllm"
    batch: Annotated[int | None, flag("--batch", help="requests that start together (1)")] = None
    input_len: Annotated[int | None, flag("--input-len", help="tokens of each prompt (1024)")] = None
    output_len: Annotated[int | None, flag("--output-len", help="tokens of each answer (128)")] = None
    requests: Annotated[
        Path | None, flag("--requests", metavar="FILE", help="CSV, JSONL or Parquet with input_tokens, output_tokens")
    ] = None
    cached: Annotated[int | None, flag("--cached", help="tokens of each prompt that the cache has already (0)")] = None
    chunk: Annotated[
        int | None, flag("--chunk", help="prefill in steps of so many tokens; 0: at once; default: the stack's")
    ] = None
    dtype: Annotated[
        str | None, flag("--dtype", metavar="FORMAT", help="of weights; default: as the checkpoint is")
    ] = None
    kv_dtype: Annotated[str | None, flag("--kv-dtype", metavar="FORMAT", help="of the KV cache")] = None
    tp: Tp = 1
    pp: Pp = 1
    ep: Annotated[int, flag("--ep", help="parts that experts are dealt out to")] = 1
    dp: Annotated[int, flag("--dp", help="attention-DP ranks that share the experts")] = 1
    images: Annotated[int, flag("--images", low=0, help="that each prompt has, beside its tokens (0)")] = 0
    image_size: Annotated[int, flag("--image-size", low=1, help="pixels of a side of each (1024)")] = 1024
    micro_batches: Annotated[int, flag("--micro-batches", help="parts of the batch in a pipeline")] = 1
    sequence_parallel: SequenceParallel = False
    draft_tokens: Annotated[int, flag("--draft-tokens", help="speculative decoding: guesses a step")] = 0
    acceptance: Annotated[float, flag("--acceptance", help="probability that a guess is right")] = 0.7
    draft_model: DraftModel = None
    set: Changes = None
    power_cap: PowerCap = None
    predictor: PredictorName = "learned"
    calibration: CalibrationFile = None
    weights: WeightsFolder = None

    def answer(self) -> Inference:
        """The batch, forecast."""
        from kernelcast.inference.infer import infer
        from kernelcast.inference.workload import with_images

        chip = chosen_gpu(self.gpu, self.set, self.power_cap)
        place = self._deployed(chosen_model(self.model), chip)
        workload = self._workload(place)
        if self.images:
            workload = with_images(workload, place, self.images, self.image_size)
        conditions = chosen_conditions(None, "model", self.predictor, self.calibration, self.weights)
        return infer(place, workload, conditions)

    def _deployed(self, model: Architecture, chip: Gpu) -> Deployment:
        from kernelcast.models.precision import Precision
        from kernelcast.stacks import stack

        layout = self.layout(self.tp, self.pp, self.dp, self.ep, sequence_parallel=self.sequence_parallel,
                             micro_batches=self.micro_batches)  # fmt: skip
        return self.place(model, chip, stack(self.stack), Precision.of(model, self.dtype, self.kv_dtype), layout)

    def _workload(self, place: Deployment) -> Workload:
        from kernelcast.inference.workload import Workload

        def deployed(draft: Architecture) -> Deployment:
            return self._deployed(draft, place.gpu)

        guesses = speculation(self.draft_tokens, self.acceptance, self.draft_model, place, deployed)
        if self.requests is not None:
            return self._listed(self.requests, guesses)
        usual = _USUAL | ({"output_len": 1} if place.model.kind == "encoder" else {})  # it writes none: one pass
        given = {name: value if (own := getattr(self, name)) is None else own for name, value in usual.items()}
        return Workload.equal(given["batch"], given["input_len"], given["output_len"], given["cached"], self.chunk,
                              guesses)  # fmt: skip

    def _listed(self, path: Path, guesses: Speculation | None) -> Workload:
        from kernelcast.inference.request_files import read_requests
        from kernelcast.inference.workload import Workload

        given = [f"--{name.replace('_', '-')}" for name in _USUAL if getattr(self, name) is not None]
        if given:
            raise KernelcastError(f"--requests lists every request with its sizes; leave out {', '.join(given)}")
        listed = read_requests(path)
        if len(set(listed.arrivals_s)) > 1:
            raise KernelcastError(
                f"{path} says when requests arrive (arrival_s), and infer runs one batch that starts together: "
                f"give it to `kernelcast simulate --trace`, or leave the column out"
            )
        return Workload(listed.inputs, listed.outputs, listed.cached, self.chunk, guesses)
