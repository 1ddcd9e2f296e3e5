"""A measured run that somebody sent: diagnosed from its bytes, which are not kept."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from kernelcast.errors import KernelcastError


def diagnose(words: Mapping[str, Any], content: bytes, limits: Mapping[str, Any]) -> dict[str, Any]:
    """As `kernelcast diagnose FILE --json` tells it."""
    from kernelcast.app.report.diagnose import fields
    from kernelcast.diagnose.diagnose import diagnose as run
    from kernelcast.diagnose.read import read_bytes
    from kernelcast.hardware import gpu

    chip, dtype = words.get("gpu"), words.get("dtype")
    if not content:
        raise KernelcastError(f"{words['filename']} is empty")
    profile, place = read_bytes(content, words["filename"], gpu(chip) if chip else None, limits["unpacked_bytes"])
    found = run(profile, place, run_dtype=dtype)
    return {"answer": fields(found), "command": _command(words), "python": _python(words)}


def _command(words: Mapping[str, Any]) -> str:
    options = [f"--{name} {words[name]}" for name in ("gpu", "dtype") if words.get(name)]
    return " ".join(["kernelcast diagnose", shlex.quote(words["filename"]), *options])


def _python(words: Mapping[str, Any]) -> str:
    chip = f", kc.gpu({words['gpu']!r})" if words.get("gpu") else ""
    dtype = f", run_dtype={words['dtype']!r}" if words.get("dtype") else ""
    return "\n".join([
        "from pathlib import Path", "", "import kernelcast as kc", "from kernelcast.diagnose.diagnose import diagnose",
        "from kernelcast.diagnose.read import read_measured", "",
        f"profile, gpu = read_measured(Path({words['filename']!r}){chip})",
        f"found = diagnose(profile, gpu{dtype})", "",
    ])  # fmt: skip
