"""Events of a Chrome trace as torch.profiler writes it.

A kernel names the innermost op that launched it by "External id" and its launch by "correlation"; an op carries its
ATen arguments in "Input Dims", "Input type", "Input Strides" and "Concrete Inputs".
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError

Event = dict[str, Any]
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cuda_runtime", "cuda_driver")
NAME_CHARS = 160
SHAPE_CHARS = 200
_NOISE = ("void ", "at::native::", "(anonymous namespace)::", "c10::")
_GZIP = b"\x1f\x8b"


def load_trace(path: Path) -> dict[str, Any]:
    """The whole content of a trace file, plain or compressed; a bare list of events too."""
    return parse_trace(path.read_bytes(), path)


def parse_trace(raw: bytes, path: Path, max_bytes: int | None = None, max_events: float = math.inf) -> dict[str, Any]:
    """The same of a file's bytes; ``max_bytes``: the most it may have decompressed."""
    try:
        text = (_decompressed(raw, path, max_bytes) if raw[:2] == _GZIP else raw).decode(errors="replace")
        if (events := text.count('"ph"')) <= max_events:  # as objects they take ten times the memory
            content = json.loads(text)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise KernelcastError(f"{path}: the compressed file is damaged or truncated") from None
    except json.JSONDecodeError as error:
        raise KernelcastError(f"{path}: not JSON: {error.msg} in line {error.lineno}") from None
    except RecursionError:
        raise KernelcastError(f"{path}: not a Chrome trace: lists are nested too deep") from None
    except KernelcastError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise KernelcastError(f"{path}: not a Chrome trace: {error}") from None
    if events > max_events:
        raise KernelcastError(
            f"{path}: a trace may have {max_events:,} events here, not {events:,}: record fewer steps"
        )
    if isinstance(content, list):
        content = {"traceEvents": content}
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise KernelcastError(f"{path}: not a Chrome trace: it has no list 'traceEvents'")
    return content


def _decompressed(raw: bytes, path: Path, max_bytes: int | None) -> bytes:
    if max_bytes is None:
        return gzip.decompress(raw)
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise KernelcastError(f"{path}: it has more than {max_bytes:,} bytes when it is decompressed")
    return content


def arg(event: Event, name: str) -> Any:
    return (event.get("args") or {}).get(name)


def launch_config(event: Event) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Grid, block, registers of a thread, bytes of shared memory of a CTA; empty and 0 where the trace does not say."""
    args = event.get("args") or {}
    grid, block = args.get("grid") or (), args.get("block") or ()
    registers, smem = args.get("registers per thread") or 0, args.get("shared memory") or 0
    return tuple(map(int, grid)), tuple(map(int, block)), int(registers), int(smem)


def short_name(name: str) -> str:
    """At most 160 characters: without namespaces that say nothing; a checksum keeps long names apart."""
    full = name
    for namespace in _NOISE:
        name = name.replace(namespace, "")
    return name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 9]}~{zlib.crc32(full.encode()):08x}"


def shape_text(dims: Sequence[Any]) -> str:
    """'512x4096,4096x4096': an input each; '-' is a scalar, '[290]' a list of so many tensors."""
    shapes = [_shape(dim) for dim in dims]
    while shapes and shapes[-1] == "-":
        shapes.pop()
    text = ",".join(shapes)
    return text if len(text) <= SHAPE_CHARS else text[: SHAPE_CHARS - 1] + "~"


def _shape(dim: Any) -> str:
    if not isinstance(dim, list) or not dim:
        return "-"
    return f"[{len(dim)}]" if isinstance(dim[0], list) else "x".join(str(n) for n in dim)
