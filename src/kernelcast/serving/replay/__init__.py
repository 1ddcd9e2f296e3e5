"""A server's own benchmark beside the simulation of the same load, and what it teaches of the server."""

from kernelcast.serving.replay.compare import Figure, Part, Replay, replay
from kernelcast.serving.replay.fit import Fit, Fitted, calibrate, least_spread, part_of

__all__ = ["Figure", "Fit", "Fitted", "Part", "Replay", "calibrate", "least_spread", "part_of", "replay"]
