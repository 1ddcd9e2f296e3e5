"""Where a command is asked to write: a place that cannot be written to is refused before the work, not after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_WRITTEN = ("-o", "--output", "--out", "--plot", "--timeline", "--requests-out")
_TIMELINE = ("--trace", "FILE.json")  # other commands read a --trace, of requests
_FOLDER = "DIR"  # what help calls a folder
_MAKES_FOLDERS = ("collect", "collect-models")  # commands that make the folder that their file goes to


def check_targets(command: str, params: Iterable[Any], given: Mapping[str, Any]) -> None:
    """Refuse what a command could not write; ``given``: what its options are, by their names."""
    from kernelcast.files import check_folder, check_writable

    for param in params:
        target = given.get(param.name)
        if not isinstance(target, Path) or not is_written(param):
            continue
        if param.metavar == _FOLDER:
            check_folder(target)
            continue
        if command in _MAKES_FOLDERS:
            check_folder(target.parent)
        if command not in _MAKES_FOLDERS or target.parent.is_dir():
            check_writable(target)
        if "--plot" in param.opts:
            from kernelcast.app.report.picture import check_picture

            check_picture(target)


def is_written(param: Any) -> bool:
    flag, metavar = _TIMELINE
    return any(name in _WRITTEN or (name == flag and param.metavar == metavar) for name in param.opts)
