"""Words that say how experts are chosen and reached, and what links GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from kernelcast.app.questions.words import flags_under

if TYPE_CHECKING:
    from kernelcast.hardware import Gpu
    from kernelcast.inference.deployment import Deployment, Layout
    from kernelcast.models.architecture import Architecture
    from kernelcast.models.precision import Precision
    from kernelcast.stacks import Stack

_experts = flags_under("Experts")
_links = flags_under("Links")


@dataclass(frozen=True)
class ClusterChoice:
    """The words as they were given; None: not given."""

    routing: Annotated[
        str, _experts("--routing", metavar="NAME", help="of tokens to experts: expected, random (by chance), balanced")
    ] = "expected"
    skew: Annotated[
        float, _experts("--skew", help="tokens over experts by a power law of this exponent, in place of --routing")
    ] = 0.0
    exchange: Annotated[
        str | None,
        _experts("--exchange", metavar="NAME", help="tokens to experts under --dp: nccl, allgather, deepep, alltoall"),
    ] = None
    moe_backend: Annotated[
        str | None,
        _experts("--moe-backend", metavar="NAME", help="the experts' kernel: triton, cutlass, trtllm, …"),
    ] = None
    redundant_experts: Annotated[
        int, _experts("--redundant-experts", help="spare copies of hot experts, placed by load (EPLB)")
    ] = 0
    two_batch_overlap: Annotated[
        bool, _experts("--two-batch-overlap", help="exchange one half of the batch beside the other's work")
    ] = False
    fabric: Annotated[
        str | None, _links("--fabric", metavar="ID", help="between GPUs of a node; or a FILE.toml; default: their own")
    ] = None
    between_nodes: Annotated[str, _links("--between-nodes", metavar="ID", help="the link between nodes")] = "ib_ndr"
    gpus_per_node: Annotated[int, _links("--gpus-per-node", help="GPUs that --fabric links")] = 8

    def layout(self, tp: int, pp: int, dp: int, ep: int, **more: Any) -> Layout:
        """Cuts over these links; ``more``: what else a layout has."""
        from kernelcast.inference.deployment import Layout

        return Layout(tp, pp, dp, ep, gpus_per_node=self.gpus_per_node, between_nodes=self.between_nodes,
                      link=self.fabric, **more)  # fmt: skip

    def place(self, model: Architecture, gpu: Gpu, stack: Stack, formats: Precision, layout: Layout) -> Deployment:
        """The model there, its experts chosen and reached as the options say."""
        from kernelcast.errors import unknown
        from kernelcast.inference.deployment import Deployment
        from kernelcast.inference.layers import ALL2ALL_BACKENDS
        from kernelcast.ops.base import kernel_class, parameters_of

        if self.exchange is not None:
            if self.exchange not in ALL2ALL_BACKENDS:
                raise unknown("exchange", self.exchange, ALL2ALL_BACKENDS)
            stack = replace(stack, exchange=self.exchange)
        if self.moe_backend is not None:
            known = parameters_of(kernel_class("moe"))["backend"].options
            if self.moe_backend not in known:
                raise unknown("kernel of experts", self.moe_backend, known)
            stack = replace(stack, moe_backend=self.moe_backend)
        if self.two_batch_overlap:
            layout = replace(layout, micro_batches=max(2, layout.micro_batches))
        return Deployment(
            model,
            gpu,
            stack,
            formats,
            layout,
            self.skew,
            self.routing,
            redundant=self.redundant_experts,
            overlap=self.two_batch_overlap,
        )
