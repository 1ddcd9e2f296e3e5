"""Stacks as data: of an engine, what it fuses and its overhead on the host. Which kernel it runs is in
``kernel_choices.py``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.toml_folder import ids_in, read_from

_SERVING, _LIBRARIES = (Path(__file__).parent / name for name in ("catalogue", "libraries"))
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Library:
    """A kernel library: a file of ``libraries/``, and a part of each in ``catalogue/``."""

    id: str
    name: str
    page_size: int  # tokens a page of the KV cache that its decode reads; 0: not in pages
    called: Pairs = ()  # a backend by the name that its users give it: by the name that it has here
    runs: Pairs = ()  # "op dtype": the format that it computes in, where it differs
    sources: Pairs


@dataclass(frozen=True, kw_only=True)
class Stack(Library):
    """An inference engine. Host times in seconds, measured or estimated as the file says."""

    release: str  # that the file describes: the newest that was measured end to end
    kernels: str  # whose measured layers (gemm, attention, moe, all-reduce) it runs
    mla_kernels: str  # whose latent attention
    small_ops: str  # whose norms, activations and rotations
    joined_projections: bool  # q, k, v as one product; gate and up as one
    latent_layers: bool  # latent attention was measured as a whole layer, projections inside
    exchange: str  # how tokens are dispatched to experts where attention is data parallel: see inference/layers.py
    shared_stream: bool  # shared experts run beside routed ones in small steps
    fused_residual: bool  # the residual is added inside the norm
    fused_activation: bool  # activation times the other half in one kernel
    # Formats in which activations leave norms and activation functions, ready for the next product
    fused_quantisation: tuple[str, ...]
    graphs: bool  # decode steps of captured sizes replay a CUDA graph
    mixed_steps: bool  # chunked prefill: prompts are prefilled in the steps in which others decode; else before them
    head_rows: str  # rows of the head in a prefill: "last" of each sequence, or "all"
    step_s: float  # host time of a decode step that the GPU waits for: scheduling, inputs, sampled tokens
    prefill_s: float  # the same of a prefill
    request_s: float  # from a request's arrival to its prefill where nothing else runs: tokens, queues, processes
    launch_s: float  # host time of one op where no graph runs
    eager_ops: tuple[tuple[str, float], ...] = ()  # the same of ops that are many calls of Python
    gap_s: float  # between two kernels of a graph, beyond what a kernel's time includes
    reserved_bytes: float  # CUDA context, libraries, graphs
    reserved_parallel_bytes: float = 0.0  # more where GPUs share layers: NCCL, and buffers of all-reduces
    reserved_linked_bytes: float = 0.0  # and more over NVLink: workspaces of fused all-reduces
    logit_bytes: float = (
        6.0  # of a logit while tokens are sampled: as the head writes it, in fp32, copies of the sampler
    )
    experts_workspace: bool = True  # the workspace of routed experts stays allocated; else it is a part of their layer
    used_share: float  # of the memory, that it fills at most
    # Experts in mxfp4 are padded: a GPU's part of their width, and the hidden size, to multiples, by instruction path
    mxfp4_padding: tuple[tuple[str, tuple[int, int]], ...] = ()
    moe_backend: str = ""  # the experts' kernel, where one was chosen; "": that of kernels.toml
    # By instruction path, the attention backend of layers with sinks (gpt-oss), where the usual one takes none
    sink_attention: tuple[tuple[str, str], ...] = ()
    mxfp4_experts: tuple[tuple[str, str], ...] = ()  # that of experts in mxfp4 by instruction path, where it differs
    cache_share: float = 0.0  # of the memory that weights and activations leave, that its KV cache takes; 0: all
    static_share: float = 0.0  # of the memory, that weights and KV cache take; activations are beside them
    # Where states of recurrent layers have a pool of their own: its share of what the KV cache may take (0: there is
    # none), and how many of its states are kept for a running request beside a prefix cache
    state_share: float = 0.0
    request_states: int = 1
    # What its steps are not overlapped with: "states" of recurrent layers beside a prefix cache, a "pipeline"
    synchronous_with: tuple[str, ...] = ()
    synchronous_step_s: float = 0.0  # host time of a step beyond ``step_s`` where it follows the one before it
    sequence_s: float = 0.0  # host time that each sequence of a step adds, beyond what runs beside the GPU
    overlapped_step_s: float = 0.0  # host time of a step that runs beside the GPU's work (asynchronous scheduling)
    overlapped_sequence_s: float = 0.0  # the same of each sequence of a step
    offline_sequence_s: float = 0.0  # the same where no server streams tokens
    pipeline_step_s: float = 0.0  # host time that each stage of a pipeline adds to a pass, as nothing overlaps there
    pipeline_sequence_s: float = 0.0  # the same of each sequence
    front_s: float = 0.0  # that the front end is busy with a request, one after another: HTTP, checks
    token_s: float = 0.0  # and for each token of its prompt: the tokeniser
    # requests that are in the front end together take turns (one event loop): none goes on to the tokeniser before all
    # are read; else they pass it one after another
    front_rounds: bool = False
    prompt_factor: float = 1.0  # measured over forecast time of a prefill, where a server was measured
    decode_factor: float = 1.0  # the same of a decode step
    launch_factor: float = 1.0  # of the host's launches where no graph runs
    spread: float = 0.0  # relative error of steps of a measured server, either way; 0: the forecast's interval
    compiled_qk_norm: bool = False  # norms of queries and keys are compiled into elementwise kernels, with the rotation
    joint_attention: bool = False  # one launch for prefill and decode of a step; else one each
    graph_sizes: tuple[tuple[int, int, int], ...] = ()  # sizes of captured steps: first, last, step
    graph_tokens_per_seq: int = 0  # captured sizes end at so many times the most that decode; 0: at any number
    graph_prompts: bool = False  # steps with prompts replay graphs too, all but their attention
    vendor: str = ""  # of the GPUs that it runs on; "": any
    # By vendor or instruction path: the most that its kernels reach there, where they were not written or tuned for it
    reaches: tuple[tuple[str, Mapping[str, float]], ...] = ()
    eager_launch_s: float = 0.0  # host time of one op where graphs and compilation are off; 0: ``launch_s``
    scheduler: tuple[
        tuple[str, Any], ...
    ] = ()  # its defaults, see serving.service.EngineSettings; none: it serves no queue
    unfused: tuple[tuple[str, Any], ...] = ()  # ops that run as several kernels: each a table of its op and sizes

    @property
    def engine(self) -> str:
        """Its id without a release."""
        return self.id.partition("==")[0]

    def replays(self, tokens: Any, sequences: Any, *, decodes: Any) -> Any:
        """Whether a step replays a graph; numbers or arrays. vLLM captures steps by their tokens, engines that capture
        decode steps alone by their sequences: draft tokens do not count there."""
        size = tokens if self.graph_prompts else sequences
        return self.graphs & (size <= self.graph_tokens) & (decodes | self.graph_prompts)

    @property
    def graph_tokens(self) -> int:
        """The largest captured size; larger steps are launched kernel by kernel."""
        return max((last for _, last, _ in self.graph_sizes), default=0)

    def captured(self, most_decodes: int) -> Stack:
        """The stack with the sizes that are captured where a step decodes ``most_decodes`` tokens at most."""
        most = self.graph_tokens_per_seq * most_decodes
        if not most or most >= self.graph_tokens:
            return self
        sizes = [(first, min(last, first + (most - first) // step * step), step)
                 for first, last, step in self.graph_sizes if first <= most]  # fmt: skip
        return replace(self, graph_sizes=tuple(sizes))

    def with_host(self, factor: float) -> Stack:
        """The stack on a host whose launch and scheduling times are scaled by ``factor``."""
        if factor == 1.0:
            return self
        times = ("step_s", "prefill_s", "launch_s", "eager_launch_s", "gap_s", "sequence_s", "overlapped_step_s",
                 "overlapped_sequence_s")  # fmt: skip
        changed: dict[str, Any] = {name: getattr(self, name) * factor for name in times}
        return replace(self, **changed, eager_ops=tuple((op, factor * time_s) for op, time_s in self.eager_ops))

    def waits_s(self, kernels_s: Any, launched: Any, sequences: Any, *, graph: Any, decodes: Any) -> Any:
        """How long the GPU waits for the host in a step, beyond ``step_s`` and ``sequence_s``: gaps between the kernels
        of a graph, and what the host does beside the GPU takes longer than the kernels. Numbers or arrays."""
        busy_s = self.busy_s(launched, sequences, graph=graph, decodes=decodes)
        return np.maximum(np.where(graph, launched[0] * self.gap_s, 0.0), busy_s - kernels_s)

    def busy_s(self, launched: Any, sequences: Any, *, graph: Any, decodes: Any) -> Any:
        """What the host does in a step while the GPU works: it schedules the next, and launches kernels one by one
        where no graph runs. A graph of a step with prompts is in pieces: attention is launched between them.
        ``launched``: kernels, the host's seconds to launch all of them, and those of attention."""
        _, launching_s, attention_s = launched
        outside_s = np.where(graph, np.where(decodes, 0.0, attention_s), launching_s)
        return self.overlapped_step_s + self.overlapped_sequence_s * sequences + outside_s

    def runs_on(self, vendor: str) -> bool:
        """Whether it runs on GPUs of this vendor."""
        return self.vendor in ("", vendor.lower())

    def eager(self) -> Stack:
        """The stack without CUDA graphs and compilation (vLLM's --enforce-eager, SGLang's --disable-cuda-graph): every
        op of every step is launched by Python."""
        return replace(self, graphs=False, graph_prompts=False, launch_s=max(self.launch_s, self.eager_launch_s))

    def synchronous(self) -> Stack:
        """The stack where a step is scheduled after the one before it: nothing of the host's work is overlapped."""
        exposed: dict[str, Any] = {name: getattr(self, name) + getattr(self, f"overlapped_{name}")
                                   for name in ("step_s", "sequence_s")}  # fmt: skip
        exposed |= {
            name: exposed.get(name, self.prefill_s) + self.synchronous_step_s for name in ("step_s", "prefill_s")
        }
        return replace(self, **exposed, overlapped_step_s=0.0, overlapped_sequence_s=0.0, synchronous_step_s=0.0)

    def in_pipeline(self, stages: int) -> Stack:
        """The stack where a pass goes through so many stages, each with a host of its own."""
        if stages == 1:
            return self
        step_s, sequence_s = stages * self.pipeline_step_s, stages * self.pipeline_sequence_s
        return replace(self, step_s=self.step_s + step_s, prefill_s=self.prefill_s + step_s,
                       sequence_s=self.sequence_s + sequence_s, pipeline_step_s=0.0, pipeline_sequence_s=0.0,
                       offline_sequence_s=self.offline_sequence_s + sequence_s)  # fmt: skip

    def without_server(self) -> Stack:
        """The engine in the process that uses it (``LLM.generate``), given token ids: no HTTP front end, no queues
        between processes, and no token is detokenized or streamed before a request ends."""
        return replace(self, request_s=0.0, front_s=0.0, token_s=0.0, sequence_s=self.offline_sequence_s)

    @property
    def _share(self) -> str:
        return next((name for name in ("cache_share", "static_share") if getattr(self, name)), "used_share")

    @property
    def memory_share(self) -> float:
        """What users set: vLLM's gpu_memory_utilization (``used_share``), SGLang's mem_fraction_static
        (``static_share``), TensorRT-LLM's free_gpu_memory_fraction (``cache_share``)."""
        share: float = getattr(self, self._share)
        return share

    def with_memory_share(self, share: float) -> Stack:
        """The stack with this share, in the engine's own meaning."""
        changed: dict[str, Any] = {self._share: share}
        return replace(self, **changed)

    def held_bytes(self, tp: int, *, linked: bool) -> float:
        """What the engine itself takes of each of ``tp`` GPUs; ``linked``: not by PCIe alone."""
        shared = self.reserved_parallel_bytes + (self.reserved_linked_bytes if linked else 0.0)
        return self.reserved_bytes + (shared if tp > 1 else 0.0)

    def cache_room_bytes(
        self, memory_bytes: float, held_bytes: float, weight_bytes: float, activation_bytes: float
    ) -> float:
        """What the KV cache of a GPU may take."""
        free_bytes = memory_bytes - held_bytes
        if self.static_share:  # of what is free before weights are loaded
            return self.static_share * free_bytes - weight_bytes
        if self.cache_share:
            return self.cache_share * (free_bytes - weight_bytes - activation_bytes)
        return self.used_share * memory_bytes - held_bytes - weight_bytes - activation_bytes

    def launching_s(self, op: str) -> float:
        """Host time of an op where no graph runs."""
        return dict(self.eager_ops).get(op, self.launch_s)

    def parts(self, op: str) -> Sequence[Mapping[str, Any]]:
        """The kernels that ``op`` is run as; none where it is a single kernel."""
        return dict(self.unfused).get(op, ())


def stack_ids() -> list[str]:
    """Engines."""
    return ids_in(_SERVING)


@functools.cache
def stack(name: str) -> Stack:
    """The stack called ``name``; a release, as in "vllm==0.19", by the file of the newest one that is not newer, which
    its name says."""
    engine, _, release = name.lower().partition("==")
    if not release or engine not in stack_ids():
        return read_from(_SERVING, Stack, name)
    known = {_version(each.release): each for each in (read_from(_SERVING, Stack, name) for name in _releases(engine))}
    wanted = _version(release)
    if not wanted or wanted < min(known):
        in_order = ", ".join(known[each].release for each in sorted(known))
        raise KernelcastError(f"unknown release of {stack(engine).name} {release!r}; known: {in_order}, and newer ones")
    file = known[max(each for each in known if each <= wanted)]
    if minor_release(release) == minor_release(file.release):
        return replace(file, release=release)
    return replace(file, release=release, name=f"{stack(engine).name} {release} (as {file.release})")


def minor_release(release: str) -> str:
    """Of "0.22.1" or "v0.22.1rc1" "0.22": what a release is measured and described as; others stay as they are."""
    found = re.match(r"v?(\d+\.\d+)", release)
    return found[1] if found else release


def _releases(engine: str) -> list[str]:
    """Files of an engine: the newest release, and older ones."""
    return [name for name in stack_ids() if name.partition("==")[0] == engine]


def _version(release: str) -> tuple[int, ...]:
    """The numbers of a release, "0.19", "v0.5.1" or "1.2.0rc3"; none where it has no such name."""
    found = re.fullmatch(r"v?(\d+(?:\.\d+)*)(\.?(rc|post|dev)\d*)?([+-].*)?", release)
    return tuple(map(int, found[1].split("."))) if found else ()


@functools.cache
def runner(name: str | None) -> Library | None:
    """The library or engine of a call's stack; None where it has no file."""
    if name in ids_in(_SERVING):
        return stack(str(name))
    return read_from(_LIBRARIES, Library, str(name)) if name in ids_in(_LIBRARIES) else None
