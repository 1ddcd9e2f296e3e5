"""Pictures, where Matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError


@contextmanager
def picture(path: Path, size: tuple[float, float], rows: int = 1) -> Iterator[tuple[Any, Any]]:
    """A figure with so many axes, one under another; written to ``path`` at the end."""
    try:
        import matplotlib
    except ImportError:
        raise KernelcastError("--plot needs Matplotlib: pip install 'kernelcast[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, 1, figsize=size, squeeze=False)
    try:
        yield figure, axes[:, 0]
        figure.savefig(path, dpi=110)
    except ValueError as error:  # an ending that names no format
        raise KernelcastError(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)
