"""Draws a Mermaid flow chart as SVG: boxes in levels, arrows that go round them.

GitHub draws Mermaid by itself. The site must not load a script from anywhere, so its hook puts this picture in the
place of the block. Only what our pages use is read: ``flowchart LR``, ``a --> b``, ``a[label]``, ``a["label"]``.
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NODE = re.compile(r"\s*(?P<name>[\w.]+)(?:\[\"?(?P<label>[^\]\"]*)\"?\])?\s*$")
_LINE, _PAD, _CHAR, _GAP, _ROW = 18.0, 12.0, 7.3, 26.0, 46.0
_TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" class="tip"/></marker>'
)
_ROUNDS = 12  # of sorting each level by where its neighbours are


@dataclass
class Box:
    """A node, or a place where a long arrow passes a level (no label)."""

    label: tuple[str, ...]
    level: int
    at: float = 0.0  # the middle, across the levels
    above: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)

    @property
    def width(self) -> float:
        return max(map(len, self.label)) * _CHAR + 2 * _PAD if self.label else 6.0

    @property
    def height(self) -> float:
        return len(self.label) * _LINE + _PAD if self.label else 0.0


def read(text: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Labels by node, and arrows."""
    labels: dict[str, str] = {}
    arrows: list[tuple[str, str]] = []
    for line in text.splitlines()[1:]:
        chain = []
        for part in line.split("-->"):
            if match := _NODE.match(part):
                labels.setdefault(match["name"], match["name"])
                if match["label"]:
                    labels[match["name"]] = match["label"]
                chain.append(match["name"])
        arrows += itertools.pairwise(chain)
    return labels, arrows


def laid_out(text: str) -> dict[str, Box]:
    """Boxes with their places; long arrows have a place in every level that they pass."""
    labels, arrows = read(text)
    levels = _levels(labels, arrows)
    boxes = {name: Box(tuple(label.split("<br>")), levels[name]) for name, label in labels.items()}
    for low, high in arrows:
        before = low
        for level in range(levels[low] + 1, levels[high]):
            name = f"{low}>{high}:{level}"
            boxes[name] = Box((), level)
            _join(boxes, before, name)
            before = name
        _join(boxes, before, high)
    rows = [[name for name in boxes if boxes[name].level == n] for n in range(1 + max(levels.values()))]
    for number in range(_ROUNDS):
        for row in rows if number % 2 == 0 else reversed(rows):
            _place(row, boxes, number)
    return boxes


def _join(boxes: dict[str, Box], low: str, high: str) -> None:
    boxes[low].below.append(high)
    boxes[high].above.append(low)


def _levels(labels: dict[str, str], arrows: list[tuple[str, str]]) -> dict[str, int]:
    """The longest way from a node that nothing points at."""
    levels = dict.fromkeys(labels, 0)
    for _ in labels:
        for low, high in arrows:
            levels[high] = max(levels[high], levels[low] + 1)
    for name in labels:  # what nothing needs early stands right above what needs it first
        above = [levels[high] for low, high in arrows if low == name]
        if above and not any(high == name for _, high in arrows):
            levels[name] = min(above) - 1
    return levels


def _place(row: list[str], boxes: dict[str, Box], number: int) -> None:
    """Sort a level by the middle of its neighbours and give every box room."""

    def wish(name: str) -> float:
        box = boxes[name]
        near = box.above if number % 2 == 0 else box.below
        return sum(boxes[other].at for other in near) / len(near) if near else box.at

    wishes = {name: wish(name) for name in row}
    row.sort(key=lambda name: wishes[name])
    at = 0.0
    for name in row:
        at += boxes[name].width / 2
        boxes[name].at = at
        at += boxes[name].width / 2 + _GAP
    # the whole level moves to where its boxes would like to be
    shift = sum(wishes[name] - boxes[name].at for name in row) / len(row)
    for name in row:
        boxes[name].at += shift


def svg(text: str) -> str:
    """The flow chart, top down, in the colours of the page."""
    boxes = laid_out(text)
    left = min(box.at - box.width / 2 for box in boxes.values()) - 4
    right = max(box.at + box.width / 2 for box in boxes.values()) + 4
    rows, y = [], 4.0  # the top of each level and its height
    for level in range(1 + max(box.level for box in boxes.values())):
        height = max(box.height for box in boxes.values() if box.level == level)
        rows.append((y, height))
        y += height + _ROW
    drawn = [line for box in boxes.values() for line in _arrows(box, boxes, rows, left)]
    drawn += [line for box in boxes.values() if box.label for line in _drawn(box, rows, left)]
    width, height = right - left, y - _ROW + 4
    return (
        f'<svg class="flow" role="img" aria-label="flow chart" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px" xmlns="http://www.w3.org/2000/svg"><defs>{_TIP}</defs>{"".join(drawn)}</svg>'
    )


def _ends(box: Box, rows: list[tuple[float, float]]) -> tuple[float, float]:
    """Top and bottom of a box, in the middle of its level."""
    top, height = rows[box.level]
    return top + (height - box.height) / 2, top + (height + box.height) / 2


def _arrows(box: Box, boxes: dict[str, Box], rows: list[tuple[float, float]], left: float) -> Iterator[str]:
    for other in (boxes[name] for name in box.below):
        x1, y1, x2, y2 = box.at - left, _ends(box, rows)[1], other.at - left, _ends(other, rows)[0]
        bend = (y2 - y1) / 2
        tip = ' marker-end="url(#tip)"' if other.label else ""
        curve = f"{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"
        yield f'<path d="M{x1:.1f} {y1:.1f}C{curve}"{tip}/>'


def _drawn(box: Box, rows: list[tuple[float, float]], left: float) -> Iterator[str]:
    x, (top, _) = box.at - left, _ends(box, rows)
    size = f'width="{box.width:.1f}" height="{box.height:.1f}"'
    yield f'<rect x="{x - box.width / 2:.1f}" y="{top:.1f}" {size} rx="5"/>'
    for number, line in enumerate(box.label):
        base = top + _PAD / 2 + _LINE * (number + 0.72)
        yield f'<text x="{x:.1f}" y="{base:.1f}">{html.escape(line)}</text>'
