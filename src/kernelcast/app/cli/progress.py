"""A progress bar on stderr, for commands that take their time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Report(Protocol):
    """Tells how far a task is; ``extra``: a few words beside its name."""

    def __call__(self, done: int, total: int, extra: str = "") -> None: ...


def _silent(done: int, total: int, extra: str = "") -> None:
    """Nobody is told."""


@contextmanager
def progress_bar(*, transient: bool = False) -> Iterator[Callable[[str], Report]]:
    """A function that starts a task by its name. Shown of each, from its first report on: the name, how much of how
    much is done, the time left. ``transient``: nothing stays on the screen at the end."""
    if transient and not sys.stderr.isatty():  # nobody looks, and Rich would leave an empty line
        yield lambda name: _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=transient) as shown:

        def start(name: str) -> Report:
            task = shown.add_task(name, total=None, visible=False)

            def report(done: int, total: int, extra: str = "") -> None:
                told = f"{name} {extra}".rstrip()
                shown.update(task, completed=done, total=total, description=told, visible=True)

            return report

        yield start
