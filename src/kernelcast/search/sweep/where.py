"""Constraints of a sweep file: 'batch * input_len <= 131072', over columns, parsed and never run as Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError, unknown

Values = Mapping[str, NDArray[Any]]
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.In: np.isin, ast.NotIn: lambda a, b: ~np.isin(a, b),
}  # fmt: skip
_TAKEN = "comparisons (< <= > >= == != in) of numbers, names and + - * / // %, joined by and, or, not"


class Where:
    """One constraint. ``words``: the values that each name of words may have; ``numbers``: the other names."""

    def __init__(self, text: str, words: Mapping[str, tuple[str, ...]], numbers: tuple[str, ...]) -> None:
        self.text, self._words, self._numbers = text, words, numbers
        if not isinstance(text, str):
            raise KernelcastError(f'a constraint in where is text such as "gpus <= 8", not {text!r}')
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise self._refused("it does not parse") from None
        self.names = frozenset(node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name))
        for name in sorted(self.names):
            if name not in words and name not in numbers:
                raise unknown(f"name in where {text!r}:", name, (*words, *numbers))
        if not isinstance(self._tree, ast.Compare | ast.BoolOp | ast.UnaryOp) or not self.names:
            raise self._refused("it compares nothing")
        self._checked(self._tree)

    def holds(self, columns: Values) -> NDArray[np.bool_]:
        with np.errstate(all="ignore"):  # what has no value, such as 1 / 0, holds in no comparison
            return np.asarray(self._value(self._tree, columns), dtype=bool)

    def _refused(self, why: str) -> KernelcastError:
        return KernelcastError(f"where {self.text!r}: {why}; it takes {_TAKEN}")

    def _checked(self, node: ast.expr) -> None:
        """Refuse all but a condition, and words that no column has, before anything is worked out."""
        if isinstance(node, ast.BoolOp):
            for one in node.values:
                self._checked(one)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._checked(node.operand)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, how, right in zip(sides, node.ops, sides[1:], strict=False):
                self._compared(left, how, right)
        else:
            raise self._refused(f"{ast.unparse(node)!r} is no comparison")

    def _compared(self, left: ast.expr, how: ast.cmpop, right: ast.expr) -> None:
        if type(how) not in _COMPARED:
            raise self._refused("it compares otherwise")
        named = next((n.id for n in (left, right) if isinstance(n, ast.Name) and n.id in self._words), None)
        member = isinstance(how, ast.In | ast.NotIn)
        if member and not isinstance(right, ast.List | ast.Tuple):
            raise self._refused("after in comes a list in brackets")
        if named is None:
            self._number(left)
            for one in right.elts if member else [right]:  # type: ignore[attr-defined]
                self._number(one)
            return
        if not isinstance(how, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            raise self._refused(f"{named} holds words, which are alike or not (==, !=, in)")
        others = right.elts if member else [right if isinstance(left, ast.Name) else left]  # type: ignore[attr-defined]
        for one in others:
            if not isinstance(one, ast.Constant) or not isinstance(one.value, str):
                raise self._refused(f"{named} is compared with a word in quotes")
            if one.value not in self._words[named]:
                raise unknown(f"{named} in where {self.text!r}:", one.value, self._words[named])

    def _number(self, node: ast.expr) -> None:
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            self._number(node.left)
            self._number(node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self._number(node.operand)
        elif not (isinstance(node, ast.Name) and node.id in self._numbers) and not (
            isinstance(node, ast.Constant) and isinstance(node.value, int | float)
        ):
            raise self._refused(f"{ast.unparse(node)!r} is no number")

    def _value(self, node: ast.expr, columns: Values) -> Any:
        match node:
            case ast.Constant(value=value):
                return value if isinstance(value, str) else np.float64(value)  # type: ignore[arg-type]  # checked
            case ast.Name(id=name):
                column = columns[name]
                return column if name in self._words else column.astype(np.float64)
            case ast.List(elts=members) | ast.Tuple(elts=members):
                return [self._value(one, columns) for one in members]
            case ast.BinOp(left=left, op=op, right=right):
                return _ARITHMETIC[type(op)](self._value(left, columns), self._value(right, columns))
            case ast.UnaryOp(op=ast.USub(), operand=one):
                return -self._value(one, columns)
            case ast.UnaryOp(operand=one):
                return ~np.asarray(self._value(one, columns), dtype=bool)
            case ast.BoolOp(op=op, values=members):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return join.reduce([self._value(one, columns) for one in members])
            case ast.Compare(left=left, ops=ops, comparators=rights):
                sides = [self._value(one, columns) for one in (left, *rights)]
                pairs = zip(sides, ops, sides[1:], strict=False)
                return np.logical_and.reduce([_COMPARED[type(how)](a, b) for a, how, b in pairs])
        raise self._refused(f"{ast.unparse(node)!r} is not known")
