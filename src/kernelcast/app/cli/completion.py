"""What a shell offers after Tab: names of GPUs, models, ops and stacks, of the parameters that take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

Values = Callable[[], Iterable[str]]


@dataclass(frozen=True)
class Item:
    """A word that may come next, as Typer shows it to shells."""

    value: str
    type: str = "plain"
    help: str | None = None


def offer_names(params: Iterable[Any], values: Mapping[str, Values]) -> None:
    """Let the options and arguments of a command complete names; of a command with a signature of its own, those that
    have the flags of others."""
    values = values or _by_name()
    for param in params:
        if param.name in values:
            param.shell_complete = partial(_offered, values[param.name], param.shell_complete)


def _offered(values: Values, usual: Callable[..., Any], ctx: Any, incomplete: str) -> Any:
    """Names that go on with what was typed; of a list with commas, its last one."""
    before, comma, last = incomplete.rpartition(",")
    names = [name for name in values() if name.lower().startswith(last.lower())]
    return [Item(f"{before}{comma}{name}") for name in names] or usual(ctx, incomplete)


def _by_name() -> dict[str, Values]:
    from kernelcast.app.questions.evidence import EvidenceQuestion
    from kernelcast.app.questions.infer import InferQuestion
    from kernelcast.app.questions.parameters import command_parameters

    parameters = (*command_parameters(InferQuestion), *command_parameters(EvidenceQuestion))
    return {parameter.name: parameter.values for parameter in parameters if parameter.values}
