"""Kernels that a stack runs though another on the GPU, in numbers as wide, is far faster: told, not replaced.

Public campaigns have such kernels (fp8 experts of one engine on Hopper take seven times as long as another's): real for
that stack, and worth knowing for whoever may choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernelcast.calls import Call
from kernelcast.efficiency.learned import WEIGHTS, load
from kernelcast.errors import KernelcastError
from kernelcast.kernels.moe import SENT
from kernelcast.serving.result import Inference

_FAR = 2.0  # times as long
# Formats of experts, by width
_AS_WIDE = (("fp8", "fp8_block", "int8"), ("nvfp4", "int4", "mxfp4", "mxfp4_fp8"), ("bf16", "fp16"))
_OP = "moe"


@dataclass(frozen=True)
class Faster:
    """A call of a phase, and the same in other words: what each takes, in seconds."""

    phase: str
    call: Call
    time_s: float
    other: Call
    other_s: float

    @property
    def text(self) -> str:
        own, other = (_words(call) for call in (self.call, self.other))
        took, would = (f"{time_s * 1e6:,.0f}" for time_s in (self.time_s, self.other_s))
        return f"{self.phase}: experts take {took} µs a layer as {own}, which runs here; {other} would take {would}"

    def told(self) -> dict[str, object]:
        names = ("stack", "backend", "dtype")
        own, other = ({name: dict(call.parameters).get(name) for name in names} for call in (self.call, self.other))
        return {"phase": self.phase, "op": _OP, "runs": own, "time_s": self.time_s, "faster": other,
                "faster_s": self.other_s}  # fmt: skip


def faster_kernels(found: Inference) -> list[Faster]:
    """At most one a phase: of the call of experts that takes longest."""
    told = []
    for phase, call in _calls(found):
        others = [call.replace(**words) for words in _measured(found.deployment.gpu.known_as, call)]
        if not others:
            continue
        try:
            found.times.learn([call, *others])
        except KernelcastError:  # one of them is refused: it could not be had
            continue
        times_s = {other: found.times[other].span.time_s for other in others}
        best, own_s = min(times_s, key=times_s.__getitem__), found.times[call].span.time_s
        if own_s > _FAR * times_s[best]:
            told.append(Faster(phase, call, own_s, best, times_s[best]))
    return told


def _calls(found: Inference) -> Iterator[tuple[str, Call]]:
    """A middling pass of each phase stands for all."""
    for phase in ("prefill", "decode"):
        passes = [one for one in found.passes if one.phase == phase]
        if passes:
            calls = [x.call for x in passes[len(passes) // 2].run.launches if x.op == _OP]
            yield from ((phase, call) for call in calls[:1])


def _measured(gpu: str, call: Call) -> list[dict[str, str | None]]:
    """Stack, backend and format of every measured kind of experts on this GPU in numbers as wide."""
    weights, own = load(WEIGHTS, _OP), str(dict(call.parameters)["dtype"])
    if weights is None or weights.evidence is None:
        return []
    wide = next((group for group in _AS_WIDE if own in group), (own,))
    kinds = {
        (entry.words["stack"], entry.words["backend"], entry.words["dtype"])
        for entry in weights.evidence.by_op.get(_OP, ())
        if entry.gpu == gpu and entry.words["dtype"] in wide and entry.words["backend"] not in SENT
    }
    return [dict(zip(("stack", "backend", "dtype"), kind, strict=True)) for kind in sorted(kinds, key=str)]


def _words(call: Call) -> str:
    given = dict(call.parameters)
    return f"{given['stack']}'s {given['backend']} in {given['dtype']}"
