"""Bodies as strict JSON: no NaN, no number beyond a float, no nesting that breaks a parser; 400 and 415 where not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from kernelcast.app.web.problems import Problem

_DEEPEST = 64  # levels of lists and objects; a model's config.json has four
_STRINGS, _BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL), re.compile(rb"[\[\]{}]")
_DIGITS = 40  # of a whole number; larger ones are no count of anything


class StrictRequest(Request):
    """What FastAPI reads bodies by."""

    async def body(self) -> bytes:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Problem(415, f"a question is application/json, not {kind[:100] or 'of no type'}")
        found = await super().body()
        if not found:
            raise Problem(400, "the body is empty: a question is a JSON object")
        return found

    async def json(self) -> Any:
        return strict_json(await self.body())


class StrictRoute(APIRoute):
    """A route whose body is strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def strict_json(raw: bytes) -> Any:
    """The value of a JSON text, by the letter of RFC 8259; a 400 ``Problem`` where it is none."""
    if _depth(raw) > _DEEPEST:
        raise Problem(400, f"JSON may be nested {_DEEPEST} levels deep here")
    try:
        return json.loads(raw.decode(), parse_constant=_refuse, parse_float=_finite, parse_int=_short,
                          object_pairs_hook=_once)  # fmt: skip
    except UnicodeDecodeError:
        raise Problem(400, "the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error.msg} in line {error.lineno}") from None


def _depth(raw: bytes) -> int:
    """How deep lists and objects lie in one another."""
    if raw.count(b"[") + raw.count(b"{") <= _DEEPEST:
        return 0
    depth = deepest = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub(b"", raw)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _refuse(word: str) -> None:
    raise Problem(400, f"the body is not JSON: {word} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Problem(400, f"{text[:40]} is larger than any number here")
    return value


def _short(text: str) -> int:
    if len(text) > _DIGITS:
        raise Problem(400, f"a whole number of {len(text)} digits is larger than any number here")
    return int(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Problem(400, "a JSON object has the same key twice")
    return found
