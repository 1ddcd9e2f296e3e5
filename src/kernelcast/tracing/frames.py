"""The Python frames of a traced program: the line of the user's code in which something is wrong, and the calls of
Python functions that a model makes, which the host's time between ops is proportional to."""

from __future__ import annotations

import _frozen_importlib
import contextlib
import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any
from unittest import mock

import torch

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_CALLERS = tuple(str(Path(__file__).with_name(name)) for name in ("run.py", "build.py"))
_STANDARD = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"
_NN = f"{_TORCH}nn{os.sep}"  # where a model of PyTorch's modules alone has its lines


def line_here() -> str:
    """``model.py:42: `` of the program that runs, or nothing where no part of it does."""
    return _user_line(list(_frames(sys._getframe(1))))


def line_of(error: BaseException) -> str:
    """Where an error was raised."""
    return _user_line(list(_raised(error.__traceback__))[::-1])


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _raised(at: TracebackType | None) -> Iterator[tuple[str, int]]:
    while at is not None:
        yield at.tb_frame.f_code.co_filename, at.tb_lineno
        at = at.tb_next


def _user_line(frames: list[tuple[str, int]]) -> str:
    """The line of the user's code, from the innermost frame to the caller of the program."""
    module = ""
    for path, line in frames:
        if path in _CALLERS:
            break
        standard = path.startswith(_STANDARD) and _SITE_PACKAGES not in path
        if not (path.startswith(("<", _TORCH, _PACKAGE)) or standard):
            return f"{_short(path)}:{line}: "
        if not module and path.startswith(_NN):
            module = f"{_short(path)}:{line}: "
    return module


def _short(path: str) -> str:
    """The path relative to the working folder or site-packages."""
    if _SITE_PACKAGES in path:
        return path.rpartition(_SITE_PACKAGES)[2]
    return path.removeprefix(f"{Path.cwd()}{os.sep}")


# ---- calls of Python functions. Counted is what runs on a machine with a GPU too: the model's code and the libraries
# that it uses. Not counted are frames of this package, of PyTorch's machinery for modes, meta tensors and
# decompositions, and everything below the recorder's handler (``pause``).

_MACHINERY = (
    "overrides.py", "utils/_python_dispatch.py", "utils/_device.py", "utils/_pytree.py", "utils/_cxx_pytree.py",
    "utils/weak.py", "utils/_mode_utils.py", "_ops.py", "_meta_registrations.py", "_refs/", "_prims/",
    "_prims_common/", "_decomp/", "library.py", "_library/", "_compile.py", "_dynamo/",
)  # fmt: skip
_TRACING = (_PACKAGE, *(_TORCH + name.replace("/", os.sep) for name in _MACHINERY))
# Of the standard library: finalisers, __instancecheck__, which is cached; and see _in_tracing.
_UNCOUNTED = ("weakref.py", "_weakrefset.py", "<frozen abc>", "<frozen _collections_abc>", "contextlib.py")
# Before 3.12 each comprehension is a function; the global hooks that name modules send every module through the others.
_NO_CALLS = {"<listcomp>", "<dictcomp>", "<setcomp>", "inner", "is_scripting", "is_compiling"}
_PROFILED = sys.version_info < (3, 12)  # since then sys.monitoring costs less, but is not quickly turned off and on
_MODULES = f"{_NN}modules{os.sep}module.py"


class PythonCalls:
    """A context in which calls are counted; on the thread that enters it."""

    def __init__(self) -> None:
        self.count = 0
        self._paused = 1  # by how many; 0 while it counts
        self._origins: dict[CodeType, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PythonCalls:
        self._stack.enter_context(mock.patch("_frozen_importlib._find_and_load", self._importing()))
        if not _PROFILED:
            self._monitor()
        else:
            self._stack.callback(sys.setprofile, sys.getprofile())
        self._stack.callback(self.pause)
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pause(self) -> None:
        """The recorder's handler begins: calls below it belong to tracing."""
        self._paused += 1
        if _PROFILED and self._paused == 1:
            sys.setprofile(None)

    def resume(self) -> None:
        self._paused -= 1
        if _PROFILED and not self._paused:
            sys.setprofile(self._event)

    def _importing(self) -> Callable[..., Any]:
        """Imports are not counted: a module that is imported now is loaded in every later step."""
        load = _frozen_importlib._find_and_load  # type: ignore[attr-defined]

        def importing(*args: Any) -> Any:
            self.pause()
            try:
                return load(*args)
            finally:
                self.resume()

        return importing

    def _monitor(self) -> None:
        """Count by sys.monitoring, which costs less than a profile function. Nothing is counted where no tool id is
        free."""
        tools: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        tool = next((number for number in (4, 3, 1, 2, 5) if tools.get_tool(number) is None), None)
        if tool is None:
            return

        def started(_: CodeType, __: int) -> None:
            if not self._paused:
                self._called(sys._getframe(1))

        tools.use_tool_id(tool, "kernelcast")
        for event in (tools.events.PY_START, tools.events.PY_RESUME):
            tools.register_callback(tool, event, started)
        tools.set_events(tool, tools.events.PY_START | tools.events.PY_RESUME)
        self._stack.callback(tools.free_tool_id, tool)
        self._stack.callback(tools.set_events, tool, 0)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._called(frame)

    def _called(self, frame: FrameType) -> None:
        origin = self._origin(frame)
        if origin == "model":
            # a mode hands a function of torch on by calling it once more
            if frame.f_back is None or self._origin(frame.f_back) != "tracing":
                self.count += 1
        elif origin == "context" and not self._in_tracing(frame):
            self.count += 1

    def _in_tracing(self, frame: FrameType | None) -> bool:
        """Whether a context manager of the standard library belongs to tracing: by its caller."""
        while frame is not None and self._origin(frame) == "context":
            frame = frame.f_back
        return frame is not None and self._origin(frame) == "tracing"

    def _origin(self, frame: FrameType) -> str:
        """The origin of a frame: model, tracing, context (managers) or none."""
        origin = self._origins.get(frame.f_code)
        if origin is None:
            origin = self._origins[frame.f_code] = _origin(frame)
        return origin


def _origin(frame: FrameType) -> str:
    code = frame.f_code
    path, name = code.co_filename, code.co_name
    if path.startswith(_TRACING):
        return "tracing"
    if isinstance(frame.f_globals.get(name), functools._lru_cache_wrapper):  # runs once, and never in a later step
        return "tracing"
    if name in _NO_CALLS and (name != "inner" or path == _MODULES):
        return "none"
    end = path.rpartition(os.sep)[2]
    if end not in _UNCOUNTED or "site-packages" in path:
        return "model"
    return "context" if end == "contextlib.py" else "none"
