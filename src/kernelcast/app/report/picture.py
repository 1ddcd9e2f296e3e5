"""Pictures, where Matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.files import complete


def matplotlib_plots() -> Any:
    """Matplotlib's pyplot, without a window."""
    try:
        import matplotlib
    except ImportError:
        raise KernelcastError("--plot needs Matplotlib: pip install 'kernelcast[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before there is anything to draw."""
    matplotlib_plots()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if _format(path) not in known:
        told = f"Format {_format(path)!r} is not supported (supported formats: {', '.join(sorted(known))})"
        raise KernelcastError(f"--plot {path}: {told}")


def _format(path: Path) -> str:
    """As the ending says; a device, which has none, takes PNG."""
    if not path.suffix and (path.is_file() or not path.exists()):
        raise KernelcastError(f"--plot {path}: the ending says which format, as in {path.name}.png")
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
