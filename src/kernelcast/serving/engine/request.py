"""A request on its way through an engine."""

from __future__ import annotations

import math

from kernelcast.serving.engine.blocks import Node, Pieces


class Request:
    """``context``: tokens that must be in the cache before the next one is sampled; ``left``: of them, not computed."""

    __slots__ = (
        "arrival_s", "at", "base", "blocks", "cached", "context", "finish", "first_s", "inputs", "last_s", "left",
        "outputs", "path", "pieces", "preempted", "replica", "scheduled_s", "shared", "steps", "written",
    )  # fmt: skip

    def __init__(self, at: int, arrival_s: float, inputs: int, outputs: int, pieces: Pieces = (), steps: int = 0):
        self.at, self.arrival_s, self.inputs, self.outputs, self.pieces = at, arrival_s, inputs, outputs, pieces
        self.steps = steps or outputs - 1  # decode steps that it takes after its first token
        self.context, self.left, self.written = inputs, inputs, 0
        self.blocks = self.shared = 0  # that it holds for itself, and of those in the prefix tree
        self.path: list[Node] = []  # nodes of the prefix tree that it holds
        self.base = self.finish = (
            0  # while it decodes: context less the rank's step count; the step after which it ends
        )
        self.scheduled_s = self.first_s = self.last_s = math.nan
        self.cached = self.preempted = self.replica = 0

    @property
    def total(self) -> int:
        """Tokens in the cache when it ends: the last one is never read."""
        return self.inputs + self.outputs - 1
