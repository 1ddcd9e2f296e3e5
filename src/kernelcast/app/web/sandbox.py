"""What a worker gives up before it answers strangers: writing, other files than the program's own, processes, sockets.

Questions name nothing but ids of catalogues, and that is checked long before. This is the second lock: a word that
would find its way to a file is stopped where Python opens one (audit events, PEP 578).
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

_REFUSED = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "subprocess.Popen", "os.system",
            "os.exec", "os.posix_spawn", "os.spawn", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod",
            "os.link", "os.symlink", "os.truncate", "shutil.rmtree")  # fmt: skip
_READ = ("open", "os.listdir", "os.scandir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_SYSTEM = ("/dev/null", "/dev/urandom", "/usr/share/zoneinfo/", "/etc/localtime")


def roots() -> tuple[str, ...]:
    """Folders that the program itself reads: the package, Python and its libraries."""
    places = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *filter(None, sys.path)}
    package = Path(__file__).resolve().parents[2]
    found = {str(Path(place).resolve()) for place in places if Path(place).resolve() != Path.cwd()}
    return (str(package), *sorted(place for place in found if len(Path(place).parts) > 2 or place == "/usr"))


def close(address_bytes: int = 0) -> None:
    """From here on, for as long as the process lives."""
    sys.dont_write_bytecode = True
    if address_bytes:
        with contextlib.suppress(ImportError, OSError, ValueError):
            import resource

            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            soft = address_bytes if hard == resource.RLIM_INFINITY else min(address_bytes, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    allowed = tuple(place.rstrip("/") + "/" for place in roots())

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event in _REFUSED:
            raise PermissionError(f"a question may not do this ({event})")
        if event in _READ and isinstance(given[0], str | bytes | os.PathLike):  # not a number of an open file
            _check(os.fsdecode(given[0]), given[2] if event == "open" and len(given) > 2 else 0, allowed)

    sys.addaudithook(watch)


def _check(path: str, flags: int, allowed: tuple[str, ...]) -> None:
    whole = os.path.abspath(path)  # noqa: PTH100  resolving links would itself ask the file system
    if flags and flags & _WRITING and whole != os.devnull:
        raise PermissionError("a question may not write files")
    if not whole.startswith(_SYSTEM) and not f"{whole}/".startswith(allowed):
        raise PermissionError("a question may not read files")
