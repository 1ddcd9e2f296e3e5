"""What is asked of a server, over time: generated, read from traces, or taken from a benchmark's own results."""

from kernelcast.serving.load.bench import read_bench
from kernelcast.serving.load.bench_results import Bench
from kernelcast.serving.load.files import LAYOUTS, Trace, read_trace
from kernelcast.serving.load.load import Load, Pieces

__all__ = ["LAYOUTS", "Bench", "Load", "Pieces", "Trace", "read_bench", "read_trace"]
