"""``kernelcast web`` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_READY_S = 60.0
_END_S = 15.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


@dataclass
class Served:
    """A running server: where it is, and how it is ended."""

    process: subprocess.Popen[bytes]
    url: str
    port: int
    log: Path

    def stop(self) -> None:
        """As Ctrl-C does; its workers must be gone with it, and it must have nothing to complain about."""
        group = self.process.pid  # it leads its own
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(_END_S)
            _until_gone(group)
        finally:
            _kill(group)
        said = self.log.read_text(encoding="utf-8").splitlines()
        assert len(said) == 1, f"the server said more than its address: {said}"


def start(folder: Path, port: int = 0) -> Served:
    """A server on this port (0: any that is free), once it has told its address."""
    log = folder / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "kernelcast", "web", "--port", str(port), "--workers", "2"],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )
    until = time.monotonic() + _READY_S
    while time.monotonic() < until and process.poll() is None:
        if found := _ADDRESS.search(log.read_text(encoding="utf-8")):
            return Served(process, found[0], int(found[1]), log)
        time.sleep(0.05)
    _kill(process.pid)
    raise AssertionError(f"the server did not start: {log.read_text(encoding='utf-8')}")


def _until_gone(group: int) -> None:
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the server left processes behind")


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
