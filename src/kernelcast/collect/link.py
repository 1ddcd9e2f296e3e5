"""The links of this machine: collectives over its GPUs, one process a GPU, and the fabric that explains their times."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from kernelcast.files import complete
from kernelcast.hardware import Fabric

OPS = ("all_reduce", "all_gather", "send_recv")
SIZES = tuple(4**power for power in range(5, 15))  # bytes: 1 KiB to 256 MiB
REPEATS, COUNT = 5, 40
_LONGEST_S = 0.2  # of the repeats of one size, about
_SLEEP_CYCLES = 40_000_000  # the host is ahead before the first starts
# Of a link's rate that good collectives sustain, as the generic estimate has it, which divides by it.
SUSTAINED = 0.80
_LEAST_SHARE = 0.05  # of the shortest time: the least that a dependent message takes where times do not vary

Say = Callable[[int, int, str], None]


@dataclass(frozen=True)
class CollectiveTime:
    """One collective: ``bytes`` as the ops of that name count them."""

    op: str
    bytes: int
    world: int
    seconds: float

    @property
    def steps(self) -> int:
        """Messages that wait for one another, in a ring."""
        return {"all_reduce": 2 * (self.world - 1), "all_gather": self.world - 1, "send_recv": 1}[self.op]

    @property
    def sent_bytes(self) -> float:
        """Bytes that each GPU sends."""
        others = (self.world - 1) / self.world
        return self.bytes * {"all_reduce": 2 * others, "all_gather": others, "send_recv": 1.0}[self.op]


@dataclass(frozen=True)
class Link:
    """The fitted link: seconds of a message, and the best send rate of a GPU by number of GPUs."""

    latency_s: float
    rates: dict[int, float]

    @classmethod
    def of(cls, timed: Sequence[CollectiveTime]) -> Link:
        """The shortest times are a start and so many messages in turn: the messages are their slope. The rates are the
        bytes that a GPU sends over the time, of the collective and the size where that is most."""
        rates: dict[int, float] = {}
        for each in timed:
            rates[each.world] = max(rates.get(each.world, 0.0), each.sent_bytes / each.seconds)
        least: dict[tuple[str, int], CollectiveTime] = {}
        for each in sorted(timed, key=lambda each: each.bytes):
            least.setdefault((each.op, each.world), each)
        steps = np.array([each.steps for each in least.values()], dtype=float)
        seconds = np.array([each.seconds for each in least.values()])
        slope = float(np.polyfit(steps, seconds, 1)[0]) if len(set(steps)) > 1 else 0.0
        # bounds: no start-up time at all, and noise that makes the slope negative
        most, few = float(np.min(seconds / steps)), float(seconds.min()) * _LEAST_SHARE
        return cls(min(max(slope, min(few, most)), most), dict(sorted(rates.items())))


def fitted(timed: Sequence[CollectiveTime], like: str, about: str) -> Fabric:
    """The fabric that forecasts of these collectives need. ``like``: the catalogued fabric of the same type."""
    link = Link.of(timed)
    best = max(link.rates.values())
    rates = ", ".join(f"{world} GPUs {rate / 1e9:.4g}" for world, rate in link.rates.items())
    return Fabric(
        kind="measured",
        bytes_per_s=best / SUSTAINED,
        latency_s=link.latency_s,
        source=f"measured in GB/s that a GPU sends: {rates}; {', '.join(OPS)} of {timed[0].bytes:,} bytes and more, "
        f"median of {REPEATS} ({about}); the best taken to be {SUSTAINED:.0%} of the link; latency: what each message "
        "in turn adds to the smallest",
        like=like,
    )


def write_link(fabric: Fabric, path: Path) -> None:
    """Write the file that ``--fabric`` takes, atomically."""
    lines = [
        f"like = {json.dumps(fabric.like)}",
        f"bytes_per_s = {fabric.bytes_per_s:.5g}",
        f"latency_s = {fabric.latency_s:.4g}",
        f"source = {json.dumps(fabric.source)}",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path) as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")


def worlds(count: int) -> list[int]:
    """2, 4, 8, … and all of them."""
    return sorted({*(2**power for power in range(1, count.bit_length()) if 2**power <= count), count})


def measure(
    count: int, backend: str, say: Say = lambda done, total, note: None, sizes: Sequence[int] = SIZES
) -> list[CollectiveTime]:
    """Times of collectives over 2 to ``count`` processes. ``backend``: nccl over GPUs; gloo over the host's memory."""
    groups = worlds(count)
    times: list[CollectiveTime] = []
    for at, world in enumerate(groups):
        say(at, len(groups), f"{world} GPUs")
        with tempfile.TemporaryDirectory() as folder:
            spawn(_rank, args=(world, backend, folder, tuple(sizes)), nprocs=world)
            times += [
                CollectiveTime(**row) for row in json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))
            ]
    say(len(groups), len(groups), "")
    return times


def _rank(rank: int, world: int, backend: str, folder: str, sizes: Sequence[int]) -> None:
    """One process of a group; the first writes down what it timed."""
    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        rows = []
        for op in OPS:
            for size in sizes:
                run = _collective(op, size, rank, world, device)
                taken = _seconds(run, device)
                rows.append(asdict(CollectiveTime(op, size, world, taken)))
        if rank == 0:
            (Path(folder) / "times.json").write_text(json.dumps(rows))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _collective(op: str, size: int, rank: int, world: int, device: torch.device) -> Callable[[], object]:
    """A collective on random numbers; the first result is checked."""
    count = max(world, size // 2 // world * world)
    x = torch.rand(count, device=device).to(torch.float16)
    if op == "all_reduce":
        x.fill_(1.0)
        dist.all_reduce(x)
        _expect(op, bool((x == world).all()))
        x = torch.rand(count, device=device).to(torch.float16) * 1e-3
        return lambda: dist.all_reduce(x)
    if op == "all_gather":
        part = torch.full((count // world,), float(rank), device=device, dtype=torch.float16)
        dist.all_gather_into_tensor(x, part)
        _expect(op, bool((x.view(world, -1)[:, 0] == torch.arange(world, device=device)).all()))
        return lambda: dist.all_gather_into_tensor(x, part)
    if rank == 0:
        return lambda: dist.send(x, 1)
    if rank == 1:
        return lambda: dist.recv(x, 0)
    return lambda: None


def _expect(op: str, right: bool) -> None:
    if not right:
        raise RuntimeError(f"{op} gave a wrong result")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one collective: all processes repeat it the same number of times, timed by the first."""
    for _ in range(2):
        run()
    count = _agreed(_once(run, device, 4), device)
    return statistics.median(_once(run, device, count) for _ in range(REPEATS))


def _agreed(seconds: float, device: torch.device) -> int:
    """How often to repeat: the first process says."""
    count = torch.tensor([max(3, min(COUNT, round(_LONGEST_S / REPEATS / seconds)))], device=device)
    dist.broadcast(count, 0)
    return int(count.item())


def _once(run: Callable[[], object], device: torch.device, count: int) -> float:
    dist.barrier()
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - begin) / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    meet: Any = torch.zeros(1, device=device)
    torch.cuda._sleep(_SLEEP_CYCLES)
    dist.all_reduce(meet)  # all are awake
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / count
