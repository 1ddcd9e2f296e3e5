"""Constraints of a sweep file: 'batch * input_len <= 131072', over columns, parsed and never run as Python."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError, unknown

Columns = Mapping[str, NDArray[Any]]
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.In: np.isin, ast.NotIn: lambda a, b: ~np.isin(a, b),
}  # fmt: skip
_TAKEN = "comparisons (< <= > >= == != in) of numbers, names and + - * / // %, joined by and, or, not"


class Constraint:
    """``texts``: the values that each column of text may have; ``numbers``: the other columns."""

    def __init__(self, text: str, texts: Mapping[str, tuple[str, ...]], numbers: tuple[str, ...]) -> None:
        self.text, self._texts = text, texts
        if not isinstance(text, str):
            raise KernelcastError(f'a constraint in where is text such as "gpus <= 8", not {text!r}')
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise self._refused("it does not parse") from None
        self.names = frozenset(node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name))
        for name in sorted(self.names):
            if name not in texts and name not in numbers:
                raise unknown(f"name in where {text!r}:", name, (*texts, *numbers))
        if not isinstance(self._tree, ast.Compare | ast.BoolOp | ast.UnaryOp) or not self.names:
            raise self._refused("it compares nothing")
        self.holds({name: np.empty(0, dtype=object) for name in self.names})  # refuses what is not a condition

    def holds(self, columns: Columns) -> NDArray[np.bool_]:
        with np.errstate(all="ignore"):  # what has no value, such as 1 / 0, holds in no comparison
            return np.asarray(self._condition(self._tree, columns), dtype=bool)

    def _refused(self, why: str) -> KernelcastError:
        return KernelcastError(f"where {self.text!r}: {why}; it takes {_TAKEN}")

    def _condition(self, node: ast.expr, columns: Columns) -> Any:
        match node:
            case ast.BoolOp(op=op, values=parts):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return functools.reduce(join, [self._condition(part, columns) for part in parts])
            case ast.UnaryOp(op=ast.Not(), operand=part):
                return np.logical_not(self._condition(part, columns))
            case ast.Compare(left=left, ops=ops, comparators=rights):
                pairs = zip((left, *rights), ops, rights, strict=False)
                return functools.reduce(np.logical_and, [self._compared(*pair, columns) for pair in pairs])
        raise self._refused(f"{ast.unparse(node)!r} is no comparison")

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr, columns: Columns) -> Any:
        if type(op) not in _COMPARED:
            raise self._refused("this comparison is not supported")
        listed = isinstance(op, ast.In | ast.NotIn)
        if listed and not isinstance(right, ast.List | ast.Tuple):
            raise self._refused("after in comes a list in brackets")
        members = right.elts if isinstance(right, ast.List | ast.Tuple) and listed else [right]
        sides = [side.id for side in (left, right) if isinstance(side, ast.Name)]
        column = next((name for name in sides if name in self._texts), None)
        if column is None:
            values = [self._number(member, columns) for member in members]
            return _COMPARED[type(op)](self._number(left, columns), values if listed else values[0])
        if not isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            raise self._refused(f"{column} is text, which is compared by ==, != or in")
        texts = [self._text(column, member) for member in (members if isinstance(left, ast.Name) else [left])]
        return _COMPARED[type(op)](columns[column], texts if listed else texts[0])

    def _text(self, column: str, node: ast.expr) -> str:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            raise self._refused(f"{column} is compared with a text in quotes")
        if node.value not in self._texts[column]:
            raise unknown(f"{column} in where {self.text!r}:", node.value, self._texts[column])
        return node.value

    def _number(self, node: ast.expr, columns: Columns) -> Any:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self._number(left, columns), self._number(right, columns))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, columns)
            case ast.Name(id=name) if name not in self._texts:
                return columns[name].astype(np.float64)
            case ast.Constant(value=int() | float() as value):
                return np.float64(value)
        raise self._refused(f"{ast.unparse(node)!r} is no number")
