"""Disaggregated deployments as static points, against AIConfigurator's measured closed loops.

Each decode worker holds its part of the requests in flight, with the mean lengths of the load, or as many as the
prefill workers can keep there. Times to first token are left out: most of a measured one is a queue, which a static
point does not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from kernelcast.errors import KernelcastError
from kernelcast.inference.disaggregated import Disaggregated, Workers, infer_pools, settled
from kernelcast_lab.data.serving import SplitPoint
from kernelcast_lab.evaluate.served import Compared
from kernelcast_lab.evaluate.serving_places import deployment_of, guesses_of

_READ = 16384  # tokens of prompts that a rank takes at a time (max_num_tokens of most recipes)
_MEAN_LENGTH = 0.9  # of the nominal one, where lengths are drawn from 0.8 to 1


def static_points(points: Iterable[SplitPoint]) -> tuple[list[Compared], Counter[str]]:
    """TPOT of each point with its interval; why others are left out."""
    found, left = [], Counter[str]()
    for point in points:
        decode = point.decode
        try:
            told = static_point(point)
        except KernelcastError as error:
            left[str(error).split(";")[0].split(" needs ")[0]] += 1
            continue
        groups = {"gpu": decode.gpu, "stack": decode.stack, "model": decode.model, "id": decode.id}
        found.append(Compared("TPOT", decode.tpot_s, told.tpot.value, groups, told.tpot.low, told.tpot.high))
    return found, left


def static_point(point: SplitPoint) -> Disaggregated:
    """The forecast of one."""
    decode, prefill = deployment_of(point.decode), deployment_of(point.prefill)
    prefill = replace(prefill, precision=replace(prefill.precision, cache=decode.precision.cache))
    share = _MEAN_LENGTH if point.decode.public else 1.0
    inputs, outputs = (max(2, round(share * n)) for n in (point.decode.input_tokens, point.decode.output_tokens))
    held = max(1, round(point.decode.concurrency / point.decode_workers))
    read = min(prefill.layout.dp * max(1, _READ // inputs), -(-point.decode.concurrency // point.prefill_workers))
    pools = Workers(prefill, read, point.prefill_workers), Workers(decode, held, point.decode_workers)
    return settled(infer_pools(*pools, inputs, outputs, speculation=guesses_of(point.decode, decode)))
