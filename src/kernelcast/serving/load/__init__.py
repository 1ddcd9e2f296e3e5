"""What is asked of a server, over time: generated, read from traces, or taken from a benchmark's own results."""

from kernelcast.serving.load.files import LAYOUTS, Trace, read_trace
from kernelcast.serving.load.load import Load, Pieces

__all__ = ["LAYOUTS", "Load", "Pieces", "Trace", "read_trace"]
