"""Pictures, where Matplotlib is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.files import complete
from kernelcast.schedule import Timeline

_MOST_EVENTS = 200_000  # of a lane: more than a viewer shows


def matplotlib_plots() -> Any:
    """Matplotlib's pyplot, without a window."""
    try:
        import matplotlib
    except ImportError:
        raise KernelcastError("`plot` needs Matplotlib: pip install 'kernelcast[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before there is anything to draw."""
    matplotlib_plots()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if _format(path) not in known:
        problem = f"Format {_format(path)!r} is not supported (supported formats: {', '.join(sorted(known))})"
        raise KernelcastError(f"`plot` {path}: {problem}")


def _format(path: Path) -> str:
    """As the ending says; a device, which has none, takes PNG."""
    if not path.suffix and (path.is_file() or not path.exists()):
        raise KernelcastError(f"`plot` {path}: the ending says which format, as in {path.name}.png")
    return path.suffix.lstrip(".").lower() or "png"


def save(figure: Any, path: Path) -> None:
    """The whole picture, or no file."""
    check_picture(path)
    with complete(path) as part:
        figure.savefig(part, dpi=110, format=_format(path))


@contextmanager
def picture(path: Path, size: tuple[float, float], rows: int = 1) -> Iterator[tuple[Any, Any]]:
    """A figure with so many axes, one under another; written to ``path`` at the end."""
    plt = matplotlib_plots()
    figure, axes = plt.subplots(rows, 1, figsize=size, squeeze=False)
    try:
        yield figure, axes[:, 0]
        save(figure, path)
    finally:
        plt.close(figure)


def plain_numbers(axis: Any) -> None:
    """20 and 300 on a scale of powers, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def write_timeline(timeline: Timeline, path: Path) -> None:
    """A process a place, a row a lane; microseconds."""
    processes = list(dict.fromkeys(lane.process for lane in timeline.lanes))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}} for pid, name in enumerate(processes)
    ]
    for tid, lane in enumerate(timeline.lanes):
        at = {"pid": processes.index(lane.process), "tid": tid}
        events.append({"ph": "M", **at, "name": "thread_name", "args": {"name": lane.name}})
        events += [
            {"ph": "X", **at, "name": event.name, "cat": event.part, "ts": round(event.start_s * 1e6, 3),
             "dur": round(event.time_s * 1e6, 3), "args": dict(event.details)}
            for event in lane.events[:_MOST_EVENTS]
        ]  # fmt: skip
    with complete(path) as part:
        part.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
