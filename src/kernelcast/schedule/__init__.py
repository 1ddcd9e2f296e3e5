"""Schedules: kernels on streams, the host that launches them, links and power, and their totals."""

from kernelcast.schedule.breakdown import EvidenceSummary, KernelTime, Memory, Share, joined, shares
from kernelcast.schedule.timeline import Event, Host, Lane, Timeline, host, host_ids, usual_host

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
    "usual_host",
]  # fmt: skip
