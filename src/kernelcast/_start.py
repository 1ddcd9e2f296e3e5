"""The start and the end of the program: Ctrl-C ends it silently with exit code 130, at any moment.

The package imports this module before all that takes long. Where the package is imported by the program itself, an
interrupt ends the process at once until a command runs: as an exception it would come out of the middle of an import,
where it is shown as a traceback or lost. While a command runs, an interrupt is an exception (what is half written is
removed, what is finished is reported), and after it the process ends at once again.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # that of typing takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

INTERRUPTED = 130  # 128 + the signal, as shells count
_SOON_S = 0.02  # after which an interrupt that got lost is sent again


class _Seen:
    interrupt = False  # while a command ran
    program = False  # whether this process is the program


def _is_program() -> bool:
    """Whether the package is imported by ``kernelcast …`` or ``python -m kernelcast …``, and not by somebody's code."""
    started = (getattr(sys, "argv", None) or [""])[0]
    if started == "-m":  # Python is still looking for the module that it is to run
        return bool({"kernelcast", "kernelcast.__main__"} & set(sys.orig_argv))
    name = os.path.basename(started).lower()  # noqa: PTH119  as does pathlib
    return name in ("kernelcast", "kernelcast.exe", "kernelcast-script.py")


def _end(signum: int, frame: object) -> None:
    os._exit(INTERRUPTED)


def _raise(signum: int, frame: object) -> None:
    _Seen.interrupt = True
    raise KeyboardInterrupt


def _again(lost: Any) -> None:
    """An exception that nobody could catch (Python reports it and continues): an interrupt is raised again later."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return
    import _thread
    import threading

    threading.Timer(_SOON_S, _thread.interrupt_main).start()


def _on_interrupt(handler: Any) -> None:
    """What Ctrl-C does; a program that was started so as not to hear it (a shell's job in the background) does not."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def running() -> None:
    """From here on a command runs. Nothing where the program is called from Python."""
    if _Seen.program:
        sys.unraisablehook = _again
        _on_interrupt(_raise)


def main() -> int:
    """The program; its exit code."""
    _Seen.program = True
    _on_interrupt(_end)
    from importlib import import_module

    try:
        code: int = import_module("kernelcast.app.cli.app").main()
    except BaseException:
        if not _Seen.interrupt:  # what an import made of an interrupt is no error of its own
            raise
        code = INTERRUPTED
    _on_interrupt(_end)
    return INTERRUPTED if _Seen.interrupt and code else code


if _is_program():
    _on_interrupt(_end)
