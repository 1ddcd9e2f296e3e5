"""A worker process: ``python -m kernelcast.app.web.worker``. Reads questions from standard input, writes answers.

It answers one question at a time and can be killed in the middle of one. It ends when its server does: a thread waits
for the end of standard input. Before the first question of a stranger it gives up files, processes and the network
(``sandbox``).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from kernelcast.app.report.json import plain
from kernelcast.app.web import frames
from kernelcast.errors import KernelcastError

Asked = tuple[dict[str, Any], bytes]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's: it closes our input
    warnings.simplefilter("ignore")  # nobody who asks would see them
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "r+b") as nothing:  # noqa: PTH123  what the library prints goes nowhere
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    settings = frames.read(source)
    if settings is None:
        return
    limits, _ = settings
    from kernelcast.app.web import sandbox, tasks

    questions: queue.SimpleQueue[Asked] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(source, questions), daemon=True).start()
    steps = tasks.warming()
    next(steps, None)  # what every question needs
    memory = _Memory()
    sandbox.close(limits["worker_bytes"])
    _send(target, {"ready": True}, b"")
    while True:
        header, payload = _next(questions, steps)
        status, answer = answered(header["task"], header["words"], payload, limits)
        retires = memory.held_bytes > limits["worker_keep_bytes"]
        _send(target, {"status": status, "retires": retires}, answer)


def answered(task: str, words: dict[str, Any], payload: bytes, limits: dict[str, Any]) -> tuple[int, bytes]:
    """HTTP's status and the answer as JSON; of a question that is refused, the line that says why."""
    from kernelcast.app.web import tasks

    try:
        found = tasks.TASKS[task](words, payload, limits)
        return 200, json.dumps(plain(found), ensure_ascii=False, allow_nan=False).encode()
    except KernelcastError as error:
        return 422, str(error).encode(errors="replace")
    except MemoryError:
        return 422, b"this question needs more memory than the server gives one: ask for less of it"
    except Exception as error:  # a question is a pure function: what breaks it is in the question
        told = traceback.format_exc(limit=-6)
        print(f"kernelcast web: {task} {json.dumps(words)[:2000]}\n{told}", file=sys.stderr, flush=True)
        return 422, f"kernelcast cannot answer this question ({type(error).__name__}: {error})".encode(errors="replace")


def _listen(source: BinaryIO, questions: queue.SimpleQueue[Asked]) -> None:
    while (frame := frames.read(source)) is not None:
        questions.put(frame)
    os._exit(0)  # the server is gone, and whoever asked with it


def _next(questions: queue.SimpleQueue[Asked], steps: Iterator[Callable[[], object]]) -> Asked:
    """The next question; until one comes, whatever makes later ones faster."""
    while True:
        with contextlib.suppress(queue.Empty):
            return questions.get_nowait()
        step = next(steps, None)
        if step is None:
            return questions.get()
        step()


class _Memory:
    """The most memory that this process ever held. Linux's ``ru_maxrss`` begins with what the process held that
    started this one; its own count is in a file, which is opened before no file may be."""

    def __init__(self) -> None:
        self._status: int | None = None
        with contextlib.suppress(OSError):
            self._status = os.open("/proc/self/status", os.O_RDONLY)

    @property
    def held_bytes(self) -> int:
        """0 where nobody counts it."""
        if self._status is not None:
            found = re.search(rb"^VmHWM:\s+(\d+) kB", os.pread(self._status, 1 << 14, 0), re.MULTILINE)
            return int(found[1]) * 1024 if found else 0
        with contextlib.suppress(ImportError):
            import resource

            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return 0


def _send(target: Any, header: dict[str, Any], payload: bytes) -> None:
    rest = memoryview(frames.packed(header, payload))
    while rest:
        rest = rest[target.write(rest) :]


if __name__ == "__main__":
    main()
