"""Pictures, where Matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError


def matplotlib_plots() -> Any:
    """Matplotlib's pyplot, without a window."""
    try:
        import matplotlib
    except ImportError:
        raise KernelcastError("--plot needs Matplotlib: pip install 'kernelcast[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


@contextmanager
def picture(path: Path, size: tuple[float, float], rows: int = 1) -> Iterator[tuple[Any, Any]]:
    """A figure with so many axes, one under another; written to ``path`` at the end."""
    plt = matplotlib_plots()
    figure, axes = plt.subplots(rows, 1, figsize=size, squeeze=False)
    try:
        yield figure, axes[:, 0]
        figure.savefig(path, dpi=110)
    except ValueError as error:  # an ending that names no format
        raise KernelcastError(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)


def plain_numbers(axis: Any) -> None:
    """20 and 300 on a scale of powers, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
