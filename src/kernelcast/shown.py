"""Results in a notebook: what they show of themselves as HTML, without knowing how that is done."""

from __future__ import annotations

from importlib import import_module


class Shown:
    """A result that a notebook shows as the command line would, as HTML. ``kernelcast.app.report.html`` makes
    it; results do not import reports, so that it is imported by name when a notebook first asks."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        found: str = import_module("kernelcast.app.report.html").html_of(self)
        return found
