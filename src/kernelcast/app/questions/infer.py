"""How fast a language model runs: one static batch, aggregated or as disaggregated prefill and decode workers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions import shared
from kernelcast.app.questions.deployment import UNCHUNKED, ClusterParameters, EngineLimits, speculation
from kernelcast.app.questions.parameters import Question, option
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.hardware import Gpu
    from kernelcast.inference.deployment import Deployment
    from kernelcast.inference.disaggregated import Disaggregated
    from kernelcast.inference.infer import Inference
    from kernelcast.inference.workload import Speculation, Workload
    from kernelcast.models.architecture import Architecture
    from kernelcast.schedule import Memory

_SIZES = ("batch", "input_len", "output_len", "cached")


@dataclass(frozen=True)
class PrefillWorkers(Question):
    """Disaggregated serving: the workers that only prefill; None: not given."""

    panel: ClassVar[str | None] = "Disaggregated serving"

    prefill_workers: Annotated[int | None, option(help="prefill workers; --tp, --batch … are the decode workers'")] = (
        None
    )
    decode_workers: Annotated[int | None, option(help="decode workers", unless_given=1)] = None
    prefill_tp: Annotated[int | None, option(help="tensor parallel size of a prefill worker", unless_given=1)] = None
    prefill_pp: Annotated[int | None, option(help="pipeline parallel size of a prefill worker", unless_given=1)] = None
    prefill_dp: Annotated[int | None, option(help="attention data parallel size of one", unless_given=1)] = None
    prefill_ep: Annotated[int | None, option(help="expert parallel size of one", unless_given=1)] = None
    prefill_batch: Annotated[int | None, option(help="prompts that one prefills together", unless_given=1)] = None
    transfer_fabric: shared.TransferFabric = None


DISAGGREGATED = tuple(member.name for member in fields(PrefillWorkers))


@dataclass(frozen=True, kw_only=True)
class InferQuestion(PrefillWorkers, EngineLimits, ClusterParameters, shared.PredictorParameters):
    """One static batch of requests; None: not given."""

    command: ClassVar[str] = "infer"

    model: shared.ModelName
    gpu: shared.GpuName = None
    stack: shared.StackName = "vllm"
    batch: Annotated[int | None, option(help="requests of the batch", unless_given=1, maximum=1 << 20)] = None
    input_len: shared.InputLen = None
    output_len: shared.OutputLen = None
    requests: Annotated[
        Path | None, option(metavar="FILE", help="CSV, JSONL or Parquet with input_tokens, output_tokens")
    ] = None
    cached: Annotated[int | None, option(help="tokens of each prompt in the prefix cache (0)")] = None
    chunk: Annotated[
        int | None, option(help="tokens a step of chunked prefill; 0: not chunked; default: the stack's")
    ] = None
    dtype: shared.WeightsFormat = None
    quantization: shared.QuantizationMethod = None
    kv_dtype: shared.KvFormat = None
    tp: shared.Tp = 1
    pp: shared.Pp = 1
    ep: shared.Ep = 1
    dp: shared.Dp = 1
    images: Annotated[int, option(help="images of each prompt, beside its tokens (0)", minimum=0)] = 0
    image_size: Annotated[int, option(help="pixels of an image's side (1024)", minimum=1)] = 1024
    micro_batches: shared.MicroBatches = 1
    sequence_parallel: shared.SequenceParallel = False
    draft_tokens: shared.DraftTokens = 0
    acceptance: shared.Acceptance = 0.7
    draft_model: shared.DraftModel = None
    set: shared.Changes = None
    power_cap: shared.PowerCap = None

    @property
    def disaggregated(self) -> bool:
        given = self.given(*DISAGGREGATED)
        if given and self.prefill_workers is None:
            raise KernelcastError(f"{given[0]} needs `prefill_workers`, such as 2")
        return bool(given)

    def answer(self) -> Inference | Disaggregated:
        """The batch, forecast; with ``prefill_workers``, both pools of workers."""
        from kernelcast.inference.infer import infer

        if self.disaggregated:
            return self._answer_disaggregated()
        deployment, workload = self.batch_of()
        result = infer(deployment, workload, self.conditions)
        if self.gpu_memory_utilization is not None:
            self._check_room(deployment, result.memory)
        return result

    def batch_of(self) -> tuple[Deployment, Workload]:
        """What runs where, before it is forecast."""
        from kernelcast.inference.workload import with_images

        deployment = self._deployment(
            shared.resolve_model(self.model), shared.resolve_gpu(self.gpu, self.set, self.power_cap)
        )
        workload = self._workload(deployment)
        if self.images:
            workload = with_images(workload, deployment, self.images, self.image_size)
        self._check_limits(deployment, workload)
        return deployment, workload

    def _answer_disaggregated(self) -> Disaggregated:
        from kernelcast.inference.disaggregated import PhaseWorkers, infer_disaggregated

        self.refuse(("requests", "images"), "`prefill_workers` serve equal requests without images")
        decode = self._deployment(
            shared.resolve_model(self.model), shared.resolve_gpu(self.gpu, self.set, self.power_cap)
        )
        work = self._workload(decode)
        self._check_limits(decode, work)
        sizes: dict[str, Any] = {name: self.value(f"prefill_{name}") for name in ("tp", "pp", "dp", "ep")}
        prefill = replace(self, **sizes)._deployment(decode.model, decode.gpu)
        return infer_disaggregated(
            PhaseWorkers(prefill, self.value("prefill_batch"), self.value("prefill_workers")),
            PhaseWorkers(decode, len(work.inputs), self.value("decode_workers")),
            work.inputs[0], work.outputs[0], cached=self.cached or 0, chunk=work.chunk,
            speculation=work.speculation, transfer=self.transfer_fabric, conditions=self.conditions,
        )  # fmt: skip

    def _deployment(self, model: Architecture, gpu: Gpu) -> Deployment:
        from kernelcast.stacks import stack

        if self.engines_at_once > 1:
            raise KernelcastError(
                f"SGLang's `dp_size` {self.dp_size} is of engines beside one another: leave it out and give the batch "
                f"of one, add `enable_dp_attention`, or see `kernelcast simulate`"
            )
        layout = self.layout(self.tp, self.pp, self.dp, self.ep, sequence_parallel=self.sequence_parallel,
                             micro_batches=self.micro_batches)  # fmt: skip
        formats = shared.precision(model, self.dtype, self.quantization, self.kv_dtype)
        return self.deployment(model, gpu, self.started(stack(self.stack)), formats, layout)

    def _workload(self, deployment: Deployment) -> Workload:
        from kernelcast.inference.workload import Workload

        def deploy(draft: Architecture) -> Deployment:
            return self._deployment(draft, deployment.gpu)

        draft = speculation(self.draft_tokens, self.acceptance, self.draft_model, deployment, deploy)
        if self.requests is not None:
            return self._requests(self.requests, deployment, draft)
        encoder = not deployment.model.generates  # one pass without output
        output_len = 1 if encoder and self.output_len is None else self.value("output_len")
        return Workload.equal(self.value("batch"), self.value("input_len"), output_len, self.cached or 0,
                              self._chunk(deployment), draft)  # fmt: skip

    def _chunk(self, deployment: Deployment) -> int | None:
        """Tokens of a prefill step, of all ranks; as engines limit them."""
        tokens, chunked = self.step_limits
        if self.chunk is not None:
            self.refuse(("max_num_batched_tokens", "enable_chunked_prefill"), "`chunk` says how prompts are chunked")
            return self.chunk
        if chunked is False:
            return 0
        if tokens is not None and tokens < 1:
            raise KernelcastError(
                f"`max_num_batched_tokens` must be 1 or more ({UNCHUNKED}: not chunked), not {tokens}"
            )
        layout = deployment.layout
        return None if tokens is None else tokens * layout.dp // self.ranks_of_limits(layout)

    def _check_limits(self, deployment: Deployment, workload: Workload) -> None:
        """Refuse a batch that the engine would not run as one."""
        most, each = self.max_num_seqs, -(-len(workload.inputs) // deployment.layout.dp)
        each *= self.ranks_of_limits(deployment.layout)
        if most is not None and not 1 <= each <= most:
            raise KernelcastError(
                f"an engine of `max_num_seqs` {most} does not run {each} sequences at once: `kernelcast simulate` has "
                f"the others wait"
            )
        if self.max_model_len is None:
            return
        limit = self.longest_request(deployment.model)
        longest = max(map(sum, zip(workload.inputs, workload.outputs, strict=True)))
        if longest > limit:
            raise KernelcastError(f"a prompt and its output have {longest:,} tokens together, more than "
                                  f"`max_model_len` {limit:,}")  # fmt: skip
        if deployment.stack.scheduler:
            from kernelcast.serving.service import engine_settings

            given = {"max_num_seqs": most, "max_num_batched_tokens": self.step_limits[0]}
            self.check_cache(deployment, engine_settings(deployment, given, limit).kv_tokens)

    def _check_room(self, deployment: Deployment, memory: Memory) -> None:
        """Refuse what fits on the GPU, but not into the share that the engine is given for its KV cache."""
        from kernelcast.errors import DoesNotFit

        stack, gib = deployment.stack, 2**30
        parts = [memory[name] for name in ("stack", "weights", "activation")]
        room = stack.cache_room_bytes(deployment.gpu.allocatable_bytes, *parts)
        if memory["cache"] > room:
            raise DoesNotFit(
                f"the batch needs {memory['cache'] / gib:.1f} GiB of KV cache a GPU, and `gpu_memory_utilization` "
                f"{stack.memory_share:g} leaves {stack.name} {max(0.0, room / gib):.1f}: give more, or fewer or "
                f"shorter requests", memory,
            )  # fmt: skip

    def _requests(self, path: Path, deployment: Deployment, draft: Speculation | None) -> Workload:
        from kernelcast.inference.request_files import read_requests
        from kernelcast.inference.workload import Workload

        self.refuse(_SIZES, "`requests` lists every request with its sizes")
        listed = read_requests(path)
        if len(set(listed.arrivals_s)) > 1:
            raise KernelcastError(
                f"{path} says when requests arrive (arrival_s), and infer runs one batch that starts together: "
                f"give it to `kernelcast simulate --trace`, or leave the column out"
            )
        return Workload(listed.inputs, listed.outputs, listed.cached, self._chunk(deployment), draft)
