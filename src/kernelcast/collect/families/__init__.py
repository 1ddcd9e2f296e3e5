"""How the calls of each measured family are drawn, and its share of all calls: one file a sort of model.

A family here is what one runner launches: an op (or some alike) of one library. A file has a ``TABLE`` of them.
"""

from __future__ import annotations

import importlib
import pkgutil

from kernelcast.collect.sampling import Table

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
_TABLES: list[Table] = [module.TABLE for module in _MODULES]
FAMILIES = {name: drawn for table in _TABLES for name, (drawn, _) in table.items()}
SHARES = {name: share for table in _TABLES for name, (_, share) in table.items()}
if len(FAMILIES) < sum(map(len, _TABLES)):
    raise ValueError("two families have the same name")
