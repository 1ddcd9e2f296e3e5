"""Why a measured row is left out: each rule has a name and a reason, and every row it takes is counted."""

from __future__ import annotations

from collections.abc import Mapping

RULES: dict[str, str] = {
    "no_kernel_family": "measures something that no kernel family computes",
    "unknown_gpu": "the GPU is not in the catalogue",
    "backfill": "shapes that only an older version of the stack measured; one stack a GPU",
    "older_version": "measured again, in full, by a newer version of the same stack",
    "suspect": "marked as impossible or as a bug of the collector by those who cleaned the data",
    "eager": "timed without a CUDA graph: Python's launch time is inside (floors of 40 to 280 us)",
    "difference_of_timings": "the difference of two timings, not a time",
    "not_one_kernel": "a chain of kernels of which the op is only one",
    "part_of_op": "leaves out a part of what the op does, or of what it reads and writes",
    "timed_alone": "the launch is inside: twice the time of the same kernel in a graph",
    "disturbed": "repeats lie up to three times apart, and another GPU's same kernel takes a fifth",
    "older_kernels": "of a release whose kernels were replaced since",
    "reference_code": "plain code of the engine that stands in for a kernel that it lacks there",
    "prefill_of_one": "one new token by the kernels of a prefill, where an engine decodes",
    "degenerate_values": "all values alike, the worst case of a kernel whose time depends on them",
    "other_shape": "the collector ran another shape than it wrote down",
    "unknown_distribution": "a routing of tokens to experts that the moe op does not describe",
    "between_nodes": "crosses nodes over a network that the source does not name",
    "unclear_fabric": "uses several kinds of links, or is slower than the named one by far",
    "copied": "the same numbers stand under another GPU's name",
    "unknown_dtype": "a number format that the op does not have",
    "bad_latency": "the time is missing, zero, negative or not finite",
    "duplicate": "the same call of the same campaign and kernel again; the median is kept",
    "missing_parameter": "a parameter that the op needs is not given",
    "out_of_range": "a parameter is outside the range of the op",
    "conflict": "parameters contradict each other",
    "not_on_gpu": "the GPU has no arithmetic of this format",
    "too_large": "does not fit into the GPU's memory by our count",
    "faster_than_physics": "less than half of the bound, with all of L2 warm",
}


def rule_of(message: str) -> str:
    """The rule that a message of the table reader falls under."""
    if " GB, but " in message:
        return "too_large"
    if " matrix arithmetic" in message:
        return "not_on_gpu"
    if " needs " in message:
        return "missing_parameter"
    if message.startswith("unknown dtype"):
        return "unknown_dtype"
    return "out_of_range" if " must be " in message else "conflict"


def ordered(counts: Mapping[str, int]) -> dict[str, int]:
    return {rule: int(counts[rule]) for rule in RULES if counts.get(rule)}
