"""The KV cache of one rank: blocks that requests hold, and the cached prefixes in freed blocks.

Prompts with a common prefix share blocks. Prefixes are given as pieces of token streams (see ``Load.shared``): the
pieces form a prefix tree, and a node has as many full blocks as were computed of it. Freed blocks stay cached until
they are evicted, least recently freed first, and of one request the last block first, as in vLLM and SGLang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

Pieces = Sequence[tuple[int, int]]


class PrefixNode:
    """A node of the prefix tree, a piece of a stream: tokens ``start`` to ``end`` of a prompt are in the cache."""

    __slots__ = ("above", "end", "freed", "holders", "start", "stream")

    def __init__(self, above: PrefixNode | None, stream: int, start: int) -> None:
        self.above, self.stream, self.start, self.end = above, stream, start, start
        self.holders = 0
        self.freed = 0  # which of its entries in the queue of freed blocks is the valid one; 0: it is held


class KvCacheBlocks:
    """``free``: blocks that no request holds. The caller must not take more."""

    def __init__(self, count: int, size: int, caching: bool) -> None:
        self.count, self.size, self.caching = count, size, caching
        self.free = count
        self._nodes: dict[tuple[PrefixNode | None, int], PrefixNode] = {}
        self._queue: deque[tuple[int, PrefixNode | None, int]] = (
            deque()
        )  # freed: blocks, their node (or None), its entry
        self._unused = count  # never used, which are taken first
        self._entries = 0

    @property
    def used(self) -> int:
        return self.count - self.free

    def needed_for(self, tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-tokens // self.size)

    def cached_prefix(self, pieces: Pieces, most: int) -> tuple[int, list[PrefixNode]]:
        """Tokens at the beginning of a prompt that are cached, in full blocks and at most ``most``; their nodes."""
        cached, start, path = 0, 0, []
        above: PrefixNode | None = None
        for stream, tokens in pieces if self.caching else ():
            node = self._nodes.get((above, stream))
            if node is None or node.end == start:
                break
            path.append(node)
            cached = min(node.end, start + tokens)
            if cached < start + tokens:
                break
            above, start = node, start + tokens
        return min(cached, most) // self.size * self.size, path

    def hold(self, path: Sequence[PrefixNode]) -> None:
        """A request uses these nodes: they may not be evicted."""
        for node in path:
            if not node.holders:
                self.free -= self._size_of(node)
                node.freed = 0
            node.holders += 1

    def unheld(self, path: Sequence[PrefixNode]) -> int:
        """Free blocks that would be taken by holding these nodes."""
        return sum(self._size_of(node) for node in path if not node.holders)

    def take(self, blocks: int) -> None:
        """Blocks for new tokens: never used ones, then the longest freed."""
        self.free -= blocks
        if not self.caching:
            return
        fresh = min(blocks, self._unused)
        self._unused -= fresh
        blocks -= fresh
        while blocks > 0 and self._queue:
            count, node, entry = self._queue[0]
            if node is None:
                taken = min(count, blocks)
                if taken == count:
                    self._queue.popleft()
                else:
                    self._queue[0] = (count - taken, None, 0)
                blocks -= taken
            elif entry != node.freed:  # it was held again since
                self._queue.popleft()
            else:
                blocks -= self._evict(node, blocks)

    def _evict(self, node: PrefixNode, blocks: int) -> int:
        """Evict the last blocks of a freed node; an empty node leaves the tree."""
        have = self._size_of(node)
        taken = min(have, blocks)
        if taken == have:
            self._queue.popleft()
            node.end, node.freed = node.start, 0
            self._nodes.pop((node.above, node.stream), None)
        else:
            node.end = (node.end // self.size - taken) * self.size
        return taken

    def store(self, pieces: Pieces, path: list[PrefixNode], computed: int) -> int:
        """A request has computed its prompt up to ``computed`` tokens: what others may share goes into the tree, held
        by it. Blocks that go from the request to the tree; ``path`` grows by the nodes."""
        moved, start = 0, 0
        above: PrefixNode | None = None
        for depth, (stream, tokens) in enumerate(pieces if self.caching else ()):
            end = min(start + tokens, computed)
            if end <= start:
                break
            node = self._nodes.get((above, stream))
            if node is None:
                node = self._nodes[above, stream] = PrefixNode(above, stream, start)
            if depth >= len(path) or path[depth] is not node:
                if depth < len(path):  # another request cached the same prefix first: the held blocks stay
                    break
                path.append(node)
                if not node.holders:
                    self.free -= self._size_of(node)
                    node.freed = 0
                node.holders += 1
            if end > node.end:
                before = self._size_of(node)
                node.end = end
                moved += self._size_of(node) - before
            if end < start + tokens:
                break
            above, start = node, start + tokens
        return moved

    def release(self, private: int, path: Sequence[PrefixNode]) -> None:
        """A request ends (or is preempted): its ``private`` blocks, and its nodes, the deepest first."""
        self.free += private
        if not self.caching:
            return
        if private:
            self._queue.append((private, None, 0))
        for node in reversed(path):
            node.holders -= 1
            if not node.holders:
                blocks = self._size_of(node)
                self.free += blocks
                self._entries += 1
                node.freed = self._entries
                self._queue.append((blocks, node, self._entries))

    def _size_of(self, node: PrefixNode) -> int:
        return node.end // self.size - node.start // self.size
