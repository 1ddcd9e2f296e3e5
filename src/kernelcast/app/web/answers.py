"""Answers that were given, by their question: the same question has the same answer until the program ends."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any


class Answers:
    """The latest answers, up to so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    @staticmethod
    def key(task: str, words: Mapping[str, Any]) -> str:
        return f"{task} {json.dumps(words, sort_keys=True)}"

    def get(self, key: str) -> bytes | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: str, answer: bytes) -> None:
        size = len(key) + len(answer)
        if key in self._kept or size > self._most // 4:  # one that would push out most of the others
            return
        self._kept[key] = answer
        self._bytes += size
        while self._bytes > self._most:
            old, gone = self._kept.popitem(last=False)
            self._bytes -= len(old) + len(gone)
