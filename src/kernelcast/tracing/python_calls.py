"""Count the calls of Python functions that a model makes: what the host spends between ops goes with them.

Counted is what runs on a machine with a GPU too: the model's own code and the libraries that it uses. What tracing
itself adds is not: frames of this package, of PyTorch's machinery for modes, meta tensors and decompositions, and
everything below the recorder's handler (``paused``).
"""

from __future__ import annotations

import _frozen_importlib
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch

_TORCH = Path(torch.__file__).parent
_OURS = (
    Path(__file__).parents[1],
    *(_TORCH / name for name in (
        "overrides.py", "utils/_python_dispatch.py", "utils/_device.py", "utils/_pytree.py", "utils/_cxx_pytree.py",
        "utils/weak.py", "utils/_mode_utils.py", "_ops.py", "_meta_registrations.py", "_refs", "_prims",
        "_prims_common", "_decomp", "library.py", "_library", "_compile.py", "_dynamo",
    )),
)  # fmt: skip
# Of the standard library: finalisers, what isinstance asks once of a class; and see _inside.
_ELSEWHERE = ("weakref.py", "_weakrefset.py", "<frozen abc>", "<frozen _collections_abc>", "contextlib.py")
# Before 3.12 each comprehension is a function; the global hooks that name modules send every module through the others.
_NO_CALLS = {"<listcomp>", "<dictcomp>", "<setcomp>", "inner", "is_scripting", "is_compiling"}
_PROFILED = sys.version_info < (3, 12)  # since then sys.monitoring costs less, but is not quickly turned off and on
_ROOTS = tuple(str(path) if path.suffix else f"{path}{os.sep}" for path in _OURS)
_MODULES = str(_TORCH / "nn" / "modules" / "module.py")


class PythonCalls:
    """A context in which calls are counted; on the thread that enters it."""

    def __init__(self) -> None:
        self.count = 0
        self._paused = 1  # by how many; 0 while it counts
        self._known: dict[CodeType, str] = {}
        self._leave = contextlib.ExitStack()

    def __enter__(self) -> PythonCalls:
        self._leave.enter_context(mock.patch("_frozen_importlib._find_and_load", self._importing()))
        if not _PROFILED:
            self._monitor()
        else:
            self._leave.callback(sys.setprofile, sys.getprofile())
        self._leave.callback(self.pause)
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.close()

    def pause(self) -> None:
        """The recorder's handler begins: below it all is tracing."""
        self._paused += 1
        if _PROFILED and self._paused == 1:
            sys.setprofile(None)

    def resume(self) -> None:
        self._paused -= 1
        if _PROFILED and not self._paused:
            sys.setprofile(self._event)

    def _importing(self) -> Callable[..., Any]:
        """A module that is first imported now is there in every later step."""
        load = _frozen_importlib._find_and_load  # type: ignore[attr-defined]

        def importing(*args: Any) -> Any:
            self.pause()
            try:
                return load(*args)
            finally:
                self.resume()

        return importing

    def _monitor(self) -> None:
        """By sys.monitoring, which costs less than a profile function. Nothing is counted where all tools are."""
        tools: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        tool = next((place for place in (4, 3, 1, 2, 5) if tools.get_tool(place) is None), None)
        if tool is None:
            return

        def started(_: CodeType, __: int) -> None:
            if not self._paused:
                self._called(sys._getframe(1))

        tools.use_tool_id(tool, "kernelcast")
        for event in (tools.events.PY_START, tools.events.PY_RESUME):
            tools.register_callback(tool, event, started)
        tools.set_events(tool, tools.events.PY_START | tools.events.PY_RESUME)
        self._leave.callback(tools.free_tool_id, tool)
        self._leave.callback(tools.set_events, tool, 0)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._called(frame)

    def _called(self, frame: FrameType) -> None:
        kind = self._known.get(frame.f_code) or self._kind(frame)
        if kind == "model":
            # a mode hands a function of torch on by calling it once more
            caller = frame.f_back
            if caller is None or (self._known.get(caller.f_code) or self._kind(caller)) != "tracing":
                self.count += 1
        elif kind == "context" and not self._inside(frame):
            self.count += 1

    def _inside(self, frame: FrameType | None) -> bool:
        """Whether a context manager of the standard library belongs to tracing: by whose it is."""
        while frame is not None and self._kind(frame) == "context":
            frame = frame.f_back
        return frame is not None and self._kind(frame) == "tracing"

    def _kind(self, frame: FrameType) -> str:
        found = self._known.get(frame.f_code)
        if found is None:
            found = self._known[frame.f_code] = _kind(frame)
        return found


def _kind(frame: FrameType) -> str:
    code = frame.f_code
    path, name = code.co_filename, code.co_name
    if path.startswith(_ROOTS):
        return "tracing"
    if isinstance(frame.f_globals.get(name), functools._lru_cache_wrapper):  # runs once, and never in a later step
        return "tracing"
    if name in _NO_CALLS and (name != "inner" or path == _MODULES):
        return "none"
    end = path.rpartition(os.sep)[2]
    if end not in _ELSEWHERE or "site-packages" in path:
        return "model"
    return "context" if end == "contextlib.py" else "none"
