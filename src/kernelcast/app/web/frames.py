"""What the server and a worker say to one another: a header of JSON and raw bytes behind it, each with its length."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, BinaryIO

_LENGTHS = struct.Struct(">IQ")


def packed(header: dict[str, Any], payload: bytes = b"") -> bytes:
    told = json.dumps(header).encode()
    return _LENGTHS.pack(len(told), len(payload)) + told + payload


def read(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next frame, None at the end of the stream."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    header_bytes, payload_bytes = _LENGTHS.unpack(lengths)
    header, payload = stream.read(header_bytes), stream.read(payload_bytes)
    return None if len(payload) < payload_bytes else (json.loads(header), payload)


async def received(stream: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """The same for the server's side; ``asyncio.IncompleteReadError`` where the worker ended."""
    header_bytes, payload_bytes = _LENGTHS.unpack(await stream.readexactly(_LENGTHS.size))
    return json.loads(await stream.readexactly(header_bytes)), await stream.readexactly(payload_bytes)
