"""Parameters of a deployment that several questions share: limits of an engine, expert parallelism, links between GPUs,
a draft model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions.parameters import Question, option
from kernelcast.app.questions.shared import fabric_names, names_of
from kernelcast.errors import KernelcastError, unknown, warn

if TYPE_CHECKING:
    from kernelcast.hardware import Gpu
    from kernelcast.inference.deployment import Deployment, Layout
    from kernelcast.inference.workload import Speculation
    from kernelcast.models.architecture import Architecture
    from kernelcast.models.precision import Precision
    from kernelcast.stacks import Stack

MTP = "mtp"  # the draft model that is the model's own prediction layers
UNCHUNKED = -1  # SGLang's --chunked-prefill-size of prompts that are prefilled whole
_experts = partial(option, panel="Experts")
_links = partial(option, panel="Links")


# values of vLLM's --all2all-backend
_EXCHANGES = {"allgather_reducescatter": "allgather", "deepep_high_throughput": "deepep",
              "deepep_low_latency": "deepep"}  # fmt: skip


def _exchange_called(name: str) -> str:
    return _EXCHANGES.get(name, name)


def _moe_backends() -> tuple[str, ...]:
    from kernelcast.ops import kernel_class, parameters_of

    return tuple(parameters_of(kernel_class("moe"))["backend"].options)


@dataclass(frozen=True)
class EngineLimits(Question):
    """How an engine is started, by the engines' names of these parameters; None: the engine's default."""

    panel: ClassVar[str | None] = "Engine"

    max_model_len: Annotated[
        int | None, option(help="tokens of a request at most, prompt and output together", minimum=1)
    ] = None
    max_num_seqs: Annotated[int | None, option(help="sequences of a step at most")] = None
    max_num_batched_tokens: Annotated[int | None, option(help="tokens of a step at most")] = None
    enable_chunked_prefill: Annotated[
        bool | None, option("--enable-chunked-prefill/--no-enable-chunked-prefill", help="chunked prefill")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        option(help="share of GPU memory for the engine (vLLM), weights and KV cache (SGLang), or of the free memory "
               "for KV cache (TensorRT-LLM)"),
    ] = None  # fmt: skip
    enforce_eager: Annotated[
        bool, option("--enforce-eager/--no-enforce-eager", help="no CUDA graphs and no torch.compile")
    ] = False

    @property
    def step_limits(self) -> tuple[int | None, bool | None]:
        """Tokens of a step, and whether prefill is chunked."""
        tokens = self.max_num_batched_tokens
        if tokens != UNCHUNKED:
            return tokens, self.enable_chunked_prefill
        if self.enable_chunked_prefill:
            raise KernelcastError(f"`max_num_batched_tokens` {UNCHUNKED} turns chunked prefill off: leave out "
                                  "`enable_chunked_prefill`")  # fmt: skip
        return None, False

    def started(self, stack: Stack) -> Stack:
        """The stack as these parameters start it."""
        if self.enforce_eager:
            stack = stack.eager()
        share = self.gpu_memory_utilization
        if share is None:
            return stack
        if not 0 < share <= 1:
            raise KernelcastError(f"`gpu_memory_utilization` must lie in (0, 1], not at {share:g}")
        return stack.with_memory_share(share)

    def longest_request(self, model: Architecture) -> int:
        """Tokens of a request at most; 0: any number."""
        length, known = self.max_model_len, model.max_context
        if length is None:
            return known
        if known and length > known:
            raise KernelcastError(
                f"`max_model_len` {length:,} is more than the {known:,} tokens that {model.name} takes"
            )
        return length

    def check_cache(self, deployment: Deployment, kv_tokens: int) -> None:
        """Refuse what vLLM does not start with: a KV cache that cannot hold one request of ``max_model_len``. SGLang
        and TensorRT-LLM start all the same, and refuse such a request when it comes."""
        length = self.max_model_len
        if length is not None and length > kv_tokens and deployment.stack.engine == "vllm":
            raise KernelcastError(
                f"{deployment.model.name} on {deployment.layout.gpus} x {deployment.gpu.id} leaves a KV cache of "
                f"{kv_tokens:,} tokens, less than one request of `max_model_len` {length:,}, and vLLM does not start: "
                f"give `max_model_len` {kv_tokens:,} or less, more GPUs (`tp`), or a higher `gpu_memory_utilization`"
            )


@dataclass(frozen=True)
class ClusterParameters(Question):
    """How tokens are routed to experts and dispatched, and what links GPUs; None: not given."""

    routing: Annotated[
        str,
        _experts(metavar="NAME", help="of tokens to experts: expected, random (sampled), balanced, identical "
                 "(a batch of one prompt)",
                 values=partial(names_of, "inference.deployment", "ROUTINGS")),
    ] = "expected"  # fmt: skip
    skew: Annotated[float, _experts(help="exponent of a power law of tokens over experts, instead of --routing")] = 0.0
    exchange: Annotated[
        str | None,
        _experts(metavar="NAME", help="all-to-all of dispatch and combine under --dp: nccl, allgather, deepep, "
                 "alltoall", values=partial(names_of, "inference.layers", "ALL2ALL_BACKENDS"), reads=_exchange_called),
    ] = None  # fmt: skip
    moe_backend: Annotated[
        str | None, _experts(metavar="NAME", help="MoE kernel: triton, cutlass, trtllm, …", values=_moe_backends)
    ] = None
    enable_expert_parallel: Annotated[
        bool,
        _experts("--enable-expert-parallel/--no-enable-expert-parallel",
                 help="experts over all tp x dp GPUs, as vLLM's flag has it: --ep of that size"),
    ] = False  # fmt: skip
    dp_size: Annotated[
        int | None,
        _experts(help="as SGLang's flag: engines beside one another or, with --enable-dp-attention, --dp; elsewhere "
                 "--dp", minimum=1),
    ] = None  # fmt: skip
    enable_dp_attention: Annotated[
        bool,
        _experts("--enable-dp-attention/--no-enable-dp-attention",
                 help="--tp counts all GPUs, as in SGLang (attention in --dp ranks of them) and TensorRT-LLM (in as "
                 "many ranks as GPUs)"),
    ] = False  # fmt: skip
    redundant_experts: Annotated[int, _experts(help="redundant experts, placed by load (EPLB)")] = 0
    two_batch_overlap: Annotated[
        bool, _experts(help="overlap dispatch and combine of one half of the batch with compute of the other")
    ] = False
    fabric: Annotated[
        str | None,
        _links(metavar="ID", help="link between GPUs of a node, or a FILE.toml; default: the GPU's",
               values=fabric_names),
    ] = None  # fmt: skip
    between_nodes: Annotated[str, _links(metavar="ID", help="link between nodes", values=fabric_names)] = "ib_ndr"
    gpus_per_node: Annotated[int, _links(help="GPUs that --fabric links")] = 8

    def layout(self, tp: int, pp: int, dp: int, ep: int, **more: Any) -> Layout:
        """Parallel sizes over these links; ``more``: other fields of a layout."""
        from kernelcast.inference.deployment import Layout

        tp, dp = self._attention_ranks(tp, dp)
        if self.enable_expert_parallel:
            if ep not in (1, tp * dp):
                raise KernelcastError(f"`enable_expert_parallel` spreads experts over {tp * dp} GPUs (`tp` x `dp`): "
                                      f"leave out `ep` {ep}")  # fmt: skip
            ep = tp * dp
        return Layout(tp, pp, dp, ep, gpus_per_node=self.gpus_per_node, between_nodes=self.between_nodes,
                      link=self.fabric, **more)  # fmt: skip

    @property
    def _by_sglang(self) -> bool:
        return str(getattr(self, "stack", "")).lower().startswith("sglang")

    @property
    def engines_at_once(self) -> int:
        """Engines that SGLang's ``dp_size`` starts beside one another."""
        return self.dp_size or 1 if self._by_sglang and not self.enable_dp_attention else 1

    def ranks_of_limits(self, layout: Layout) -> int:
        """Attention ranks that share an engine's limits: SGLang's are of all its ranks together."""
        return layout.dp if self.enable_dp_attention and self._by_sglang else 1

    def _attention_ranks(self, tp: int, dp: int) -> tuple[int, int]:
        """Tensor parallel size of an attention rank, and the number of these ranks
        (python/sglang/srt/server_args.py; enable_attention_dp of tensorrt_llm/llmapi/llm_args.py)."""
        if self.dp_size is not None and self.engines_at_once == 1:
            if dp not in (1, self.dp_size):
                raise KernelcastError(f"`dp` {dp} and `dp_size` {self.dp_size} are the same: give one of them")
            dp = self.dp_size
        if not self.enable_dp_attention or (self._by_sglang and dp == 1):
            return tp, dp
        dp = tp if dp == 1 else dp
        if tp % dp:
            raise KernelcastError(
                f"`enable_dp_attention`: `tp` {tp} counts all GPUs, and `dp` {dp} does not divide it; give `tp` {dp}, "
                "or a multiple"
            )
        return tp // dp, dp

    def deployment(self, model: Architecture, gpu: Gpu, stack: Stack, formats: Precision, layout: Layout) -> Deployment:
        """The model on these GPUs, with the routing and exchange of the parameters."""
        from kernelcast.inference.deployment import Deployment
        from kernelcast.inference.layers import ALL2ALL_BACKENDS
        from kernelcast.ops.base import kernel_class, parameters_of
        from kernelcast.search.layouts import has_experts

        if self.enable_expert_parallel and not has_experts(model):
            raise KernelcastError(f"`enable_expert_parallel`: {model.name} has no experts")
        if self.exchange is not None:
            if self.exchange not in ALL2ALL_BACKENDS:
                raise unknown("exchange", self.exchange, ALL2ALL_BACKENDS)
            stack = replace(stack, exchange=self.exchange)
        if self.moe_backend is not None:
            backends = parameters_of(kernel_class("moe"))["backend"].options
            if self.moe_backend not in backends:
                raise unknown("kernel of experts", self.moe_backend, backends)
            stack = replace(stack, moe_backend=self.moe_backend)
        if self.two_batch_overlap:
            layout = replace(layout, micro_batches=max(2, layout.micro_batches))
        check_formats(formats, gpu)
        return Deployment(model, gpu, stack, formats, layout, self.skew, self.routing,
                          redundant=self.redundant_experts, overlap=self.two_batch_overlap)  # fmt: skip


def check_formats(formats: Precision, gpu: Gpu) -> None:
    """Refuse formats that a GPU has no arithmetic for; warn of those that engines run as others."""
    from kernelcast.models.precision import WEIGHT_ONLY
    from kernelcast.ops.dtypes import matmul_pipe

    run = formats.on(gpu)
    for name in dict.fromkeys((run.between, run.weights, run.mlp_weights, run.expert_weights)):
        try:
            matmul_pipe(gpu, run.runs(name, gpu))
        except KernelcastError as error:
            weights = f"with `quantization` {name} weights alone are {name}, as engines run it there"
            hint = weights if name in WEIGHT_ONLY else "give `dtype` fp16"
            raise KernelcastError(f"{error}; {hint}") from None
    if run != formats:
        warn(f"{gpu.id} has no bf16 arithmetic: forecast in fp16, which engines fall back to")


_DRAFT_HEADS = r"eagle|medusa|speculator|hydra|dflash"


def speculation(
    draft_tokens: int, acceptance: float, draft_model: str | None, deployment: Deployment,
    deploy: Callable[[Architecture], Deployment],
) -> Speculation | None:  # fmt: skip
    """Speculative decoding; the model's own draft layers run where and as the model does."""
    from kernelcast import models
    from kernelcast.inference.workload import Speculation
    from kernelcast.models.architecture import draft_of

    if not draft_tokens:
        if draft_model:
            raise KernelcastError("`draft_model` needs `draft_tokens`, such as 4")
        return None
    if draft_model is None:
        return Speculation(draft_tokens, acceptance)
    if re.search(_DRAFT_HEADS, draft_model.lower()):
        raise KernelcastError(f"`draft_model` {draft_model}: draft heads are not forecast: leave it out (then drafts "
                              "take no time), or give mtp or a small model")  # fmt: skip
    draft = draft_of(deployment.model) if draft_model == MTP else models.model(draft_model)
    return Speculation(draft_tokens, acceptance, deploy(draft))
