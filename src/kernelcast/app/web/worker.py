"""A worker process: ``python -m kernelcast.app.web.worker``. Reads tasks from standard input, writes answers.

It runs one task at a time, leaves it where the server withdraws it, and can be killed in the middle of it. It ends when
its server does: a thread waits for the end of standard input. Before the first task it gives up writing, other files
than the program's, processes and sockets. Tasks name nothing but ids of catalogues, which is checked long before; this
is a second lock for Python's own calls: a value that reaches a file is stopped where Python opens it (audit events,
PEP 578). It does not hold code that runs natively; a container does.

Messages are a header of JSON with raw bytes behind it, each with its length.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import json
import os
import queue
import re
import signal
import struct
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kernelcast.app.report.json import plain
from kernelcast.errors import KernelcastError

Message = tuple[dict[str, Any], bytes]
Reply = tuple[int, bytes]  # HTTP's status, and the answer as JSON or the line that refuses
_GONE: Reply = (499, b"")  # of a question that was withdrawn
_TRIMMED_BYTES = 400 << 20  # held after a task: what is free of it goes back to the system
_LENGTHS = struct.Struct(">IQ")
_REFUSED = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "subprocess.Popen", "os.system",
            "os.exec", "os.posix_spawn", "os.spawn", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod",
            "os.link", "os.symlink", "os.truncate", "shutil.rmtree")  # fmt: skip
_READ = ("open", "os.listdir", "os.scandir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_SYSTEM = ("/dev/null", "/dev/urandom", "/usr/share/zoneinfo/", "/etc/localtime")


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


async def receive(stream: asyncio.StreamReader) -> Message:
    """The next message, on the server's side; ``asyncio.IncompleteReadError`` where the worker ended."""
    header_bytes, payload_bytes = _LENGTHS.unpack(await stream.readexactly(_LENGTHS.size))
    return json.loads(await stream.readexactly(header_bytes)), await stream.readexactly(payload_bytes)


def _read(stream: BinaryIO) -> Message | None:
    """The next message, None at the end of the stream."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    header_bytes, payload_bytes = _LENGTHS.unpack(lengths)
    header, payload = stream.read(header_bytes), stream.read(payload_bytes)
    return None if len(payload) < payload_bytes else (json.loads(header), payload)


def _write(target: Any, header: dict[str, Any], payload: bytes = b"") -> None:
    rest = memoryview(pack(header, payload))
    while rest:
        rest = rest[target.write(rest) :]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's: it closes our input
    warnings.simplefilter("ignore")  # nobody would see them
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "r+b") as nothing:  # noqa: PTH123  what the library prints goes nowhere
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    settings = _read(source)
    if settings is None:
        return
    limits, _ = settings
    from kernelcast.app.web import tasks

    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    turn = _Turn()
    threading.Thread(target=_listen, args=(source, inbox, turn), daemon=True).start()
    steps = tasks.warm_up()
    next(steps, None)  # what every task needs
    memory = _Memory()
    enter_sandbox(limits["worker_bytes"])
    _write(target, {"ready": True})
    while True:
        header, payload = _next(inbox, steps)
        _write(target, {"begun": header["number"]})
        limited = header["task"] == "diagnose"
        memory.limit(memory.held("VmData") + limits["file_bytes"] if limited else limits["worker_bytes"])
        work = functools.partial(run_task, header["task"], header["arguments"], payload, limits)
        status, answer = turn.answer(header["number"], work)
        memory.limit(limits["worker_bytes"])
        del payload, work
        _write(target, {"status": status, "retires": memory.left() > limits["worker_keep_bytes"]}, answer)
        del answer


class Cancelled(BaseException):
    """Nobody waits for the answer any more."""


class _Turn:
    """The question that is being answered, which the server may withdraw: a signal then interrupts the main thread."""

    def __init__(self) -> None:
        self._running = self._withdrawn = 0
        self._main = threading.main_thread().ident or 0
        self._signal = getattr(signal, "SIGUSR1", None)  # without one, the server kills this process after a while
        if self._signal is not None:
            signal.signal(self._signal, self._interrupt)
        usual = sys.unraisablehook
        sys.unraisablehook = lambda event: None if event.exc_type is Cancelled else usual(event)

    def answer(self, number: int, work: Callable[[], Reply]) -> Reply:
        """What the work gives, unless its question is withdrawn."""
        try:
            self._running = number
            reply = work() if self._withdrawn < number else _GONE
            self._running = 0
        except Cancelled:
            return _GONE
        return reply

    def withdraw(self, number: int) -> None:
        """From another thread."""
        self._withdrawn = number
        if self._signal is not None:
            signal.pthread_kill(self._main, self._signal)

    def _interrupt(self, *_: object) -> None:
        if self._running and self._running == self._withdrawn:
            self._running = 0
            raise Cancelled


def run_task(task: str, arguments: dict[str, Any], payload: bytes, limits: dict[str, Any]) -> Reply:
    """HTTP's status and the answer as JSON; where the question is refused, the line that says why."""
    from kernelcast.app.web import tasks

    try:
        answer = tasks.TASKS[task](arguments, payload, limits)
        return 200, json.dumps(plain(answer), ensure_ascii=False, allow_nan=False).encode()
    except KernelcastError as error:
        return 422, str(error).encode(errors="replace")
    except MemoryError:
        return 422, b"this request needs more memory than the server allows: request less"
    except Exception as error:  # a task is a pure function: what breaks it is in its arguments
        lines = traceback.format_exc(limit=-6)
        print(f"kernelcast web: {task} {json.dumps(arguments)[:2000]}\n{lines}", file=sys.stderr, flush=True)
        return 422, f"kernelcast cannot answer this question ({type(error).__name__}: {error})".encode(errors="replace")


def _listen(source: BinaryIO, inbox: queue.SimpleQueue[Message], turn: _Turn) -> None:
    while (message := _read(source)) is not None:
        if "cancel" in message[0]:
            turn.withdraw(message[0]["cancel"])
        else:
            inbox.put(message)
        del message
    os._exit(0)  # the server is gone


def _next(inbox: queue.SimpleQueue[Message], steps: Iterator[Callable[[], object]]) -> Message:
    """The next task; until it comes, whatever makes later tasks faster."""
    while True:
        with contextlib.suppress(queue.Empty):
            return inbox.get_nowait()
        step = next(steps, None)
        if step is None:
            return inbox.get()
        step()


class _Memory:
    """What this process holds, by /proc, opened before the sandbox closes files; and a limit to it."""

    def __init__(self) -> None:
        self._status: int | None = None
        self._trim: Callable[[int], object] = lambda _: None
        with contextlib.suppress(OSError):
            self._status = os.open("/proc/self/status", os.O_RDONLY)
        with contextlib.suppress(OSError, AttributeError, TypeError):
            self._trim = ctypes.CDLL(None).malloc_trim  # glibc keeps what is freed

    def held(self, name: str) -> int:
        """Bytes by the name of a line; 0 where nobody counts them."""
        if self._status is None:
            return 0
        match = re.search(rb"^%s:\s+(\d+) kB" % name.encode(), os.pread(self._status, 1 << 14, 0), re.MULTILINE)
        return int(match[1]) * 1024 if match else 0

    def left(self) -> int:
        """Bytes that a task left behind."""
        if self.held("VmRSS") > _TRIMMED_BYTES:
            gc.collect()
            self._trim(0)
        return self.held("VmRSS")

    def limit(self, most_bytes: int) -> None:
        if self._status is not None:
            limit_memory(most_bytes)


def limit_memory(most_bytes: int) -> None:
    """Private memory that this process may have (Linux: RLIMIT_DATA counts all of it); 0: no limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft if most_bytes else hard, hard))


def readable_folders() -> tuple[str, ...]:
    """Folders that the program itself reads: the package, Python and its libraries."""
    folders = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *filter(None, sys.path)}
    package = Path(__file__).resolve().parents[2]
    resolved = {str(Path(folder).resolve()) for folder in folders if Path(folder).resolve() != Path.cwd()}
    return (str(package), *sorted(folder for folder in resolved if len(Path(folder).parts) > 2 or folder == "/usr"))


def enter_sandbox(memory_bytes: int = 0) -> None:
    """For as long as the process lives; ``memory_bytes``: that it may have, 0: no limit."""
    sys.dont_write_bytecode = True
    limit_memory(memory_bytes)
    allowed = tuple(folder.rstrip("/") + "/" for folder in readable_folders())

    def audit(event: str, details: tuple[Any, ...]) -> None:
        if event in _REFUSED:
            raise PermissionError(f"a question may not do this ({event})")
        if event in _READ and isinstance(details[0], str | bytes | os.PathLike):  # not the number of an open file
            _check_path(os.fsdecode(details[0]), details[2] if event == "open" and len(details) > 2 else 0, allowed)

    sys.addaudithook(audit)


def _check_path(path: str, flags: int, allowed: tuple[str, ...]) -> None:
    absolute = os.path.abspath(path)  # noqa: PTH100  resolving links would itself ask the file system
    if flags and flags & _WRITING and absolute != os.devnull:
        raise PermissionError("a question may not write files")
    if not absolute.startswith(_SYSTEM) and not f"{absolute}/".startswith(allowed):
        raise PermissionError("a question may not read files")


if __name__ == "__main__":
    main()
