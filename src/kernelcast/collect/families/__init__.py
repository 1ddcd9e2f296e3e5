"""How the calls of each measured family are drawn, and how many of all calls each gets: one file a kind of model.

A family here is what one runner launches: an op (or some alike) of one library. A file has a ``TABLE`` of them.
"""

from __future__ import annotations

import importlib
import pkgutil

from kernelcast.collect.families.table import Drawn, Table

__all__ = ["FAMILIES", "SHARES", "Drawn", "Table"]


def _tables() -> Table:
    found: dict[str, object] = {}
    for module in pkgutil.iter_modules(__path__):
        table = getattr(importlib.import_module(f"{__name__}.{module.name}"), "TABLE", {})
        if twice := found.keys() & table.keys():
            raise ValueError(f"two families are called {', '.join(sorted(twice))}")
        found |= table
    return found  # type: ignore[return-value]


_TABLE = _tables()
FAMILIES = {name: drawn for name, (drawn, _) in _TABLE.items()}
SHARES = {name: share for name, (_, share) in _TABLE.items()}
