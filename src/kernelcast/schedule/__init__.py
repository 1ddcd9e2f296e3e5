"""Work laid out in time: kernels on streams, the host that launches them, links and power; and what they add up to."""

from kernelcast.schedule.events import Event, Lane, Timeline
from kernelcast.schedule.host import Host, host, host_ids
from kernelcast.schedule.memory import Memory
from kernelcast.schedule.ran import KernelTime, Share, joined, shares
from kernelcast.schedule.rests import EvidenceSummary

__all__ = [
    "Event",
    "EvidenceSummary",
    "Host",
    "KernelTime",
    "Lane",
    "Memory",
    "Share",
    "Timeline",
    "host",
    "host_ids",
    "joined",
    "shares",
]  # fmt: skip
