"""Work laid out in time: kernels on streams, the host that launches them, links and power; and what they add up to."""

from kernelcast.timeline.events import Event, Lane, Timeline
from kernelcast.timeline.host import Host, host, host_ids
from kernelcast.timeline.memory import Memory
from kernelcast.timeline.ran import Ran, Share, joined, shares
from kernelcast.timeline.rests import RestsOn

__all__ = [
    "Event", "Host", "Lane", "Memory", "Ran", "RestsOn", "Share", "Timeline", "host", "host_ids", "joined", "shares",
]  # fmt: skip
