"""Parameters of a deployment that several questions share: expert parallelism, links between GPUs, a draft model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from kernelcast.app.questions.parameters import Question, option
from kernelcast.app.questions.shared import fabric_names, names_of
from kernelcast.errors import KernelcastError, unknown

if TYPE_CHECKING:
    from kernelcast.hardware import Gpu
    from kernelcast.inference.deployment import Deployment, Layout
    from kernelcast.inference.workload import Speculation
    from kernelcast.models.architecture import Architecture
    from kernelcast.models.precision import Precision
    from kernelcast.stacks import Stack

MTP = "mtp"  # the draft model that is the model's own prediction layers
_experts = partial(option, panel="Experts")
_links = partial(option, panel="Links")


def _moe_backends() -> tuple[str, ...]:
    from kernelcast.ops import kernel_class, parameters_of

    return tuple(parameters_of(kernel_class("moe"))["backend"].options)


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
                 "alltoall", values=partial(names_of, "inference.layers", "ALL2ALL_BACKENDS")),
    ] = None  # fmt: skip
    moe_backend: Annotated[
        str | None, _experts(metavar="NAME", help="MoE kernel: triton, cutlass, trtllm, …", values=_moe_backends)
    ] = None
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

        return Layout(tp, pp, dp, ep, gpus_per_node=self.gpus_per_node, between_nodes=self.between_nodes,
                      link=self.fabric, **more)  # fmt: skip

    def deployment(self, model: Architecture, gpu: Gpu, stack: Stack, formats: Precision, layout: Layout) -> Deployment:
        """The model on these GPUs, with the routing and exchange of the parameters."""
        from kernelcast.inference.deployment import Deployment
        from kernelcast.inference.layers import ALL2ALL_BACKENDS
        from kernelcast.ops.base import kernel_class, parameters_of

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
        return Deployment(model, gpu, stack, formats, layout, self.skew, self.routing,
                          redundant=self.redundant_experts, overlap=self.two_batch_overlap)  # fmt: skip


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
    draft = draft_of(deployment.model) if draft_model == MTP else models.model(draft_model)
    return Speculation(draft_tokens, acceptance, deploy(draft))
