"""Where in a program something is wrong: the file and line of the innermost frame that is a person's own."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_CALLERS = tuple(str(Path(__file__).with_name(name)) for name in ("run.py", "build.py"))
_STANDARD = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
_PACKAGES = f"{os.sep}site-packages{os.sep}"
_MODELS = f"{_TORCH}nn{os.sep}"  # a model of PyTorch's own modules alone has no other place


def line_here() -> str:
    """``model.py:42: `` of the program that runs, or nothing where no part of it does."""
    return _told(list(_frames(sys._getframe(1))))


def line_of(error: BaseException) -> str:
    """Where an error was raised."""
    return _told(list(_raised(error.__traceback__))[::-1])


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _raised(at: TracebackType | None) -> Iterator[tuple[str, int]]:
    while at is not None:
        yield at.tb_frame.f_code.co_filename, at.tb_lineno
        at = at.tb_next


def _told(frames: list[tuple[str, int]]) -> str:
    """Of frames from the innermost on, as far as the one that called the program."""
    module = ""
    for path, line in frames:
        if path in _CALLERS:
            break
        if _is_own(path):
            return f"{_short(path)}:{line}: "
        if not module and path.startswith(_MODELS):
            module = f"{_short(path)}:{line}: "
    return module


def _is_own(path: str) -> bool:
    standard = path.startswith(_STANDARD) and _PACKAGES not in path
    return not (path.startswith(("<", _TORCH, _OURS)) or standard)


def _short(path: str) -> str:
    """From the working folder, or from where packages lie."""
    if _PACKAGES in path:
        return path.rpartition(_PACKAGES)[2]
    here = f"{Path.cwd()}{os.sep}"
    return path.removeprefix(here)
