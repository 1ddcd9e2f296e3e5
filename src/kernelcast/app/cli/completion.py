"""What a shell offers after Tab: names of GPUs, models, ops and stacks, by the option that takes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

_ASKED = "_KERNELCAST_COMPLETE"  # set by a shell that asks how a line may go on
_LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # the line so far: of bash, of the others
_WHITE = (" ", "\n", "\t")


@dataclass(frozen=True)
class Item:
    """A word that may come next, as Typer shows it to shells."""

    value: str
    type: str = "plain"
    help: str | None = None


def completing() -> bool:
    """Whether a shell asks how a line may go on, and nobody runs a command."""
    return bool(os.environ.get(_ASKED))


def asked_line() -> Sequence[str]:
    """The finished words of the line that a shell asks about, without the program's name."""
    line = next((os.environ[name] for name in _LINES if name in os.environ), "")
    words = line.split()
    return words[1:] if line.endswith(_WHITE) else words[1:-1]


def offer_names(params: Iterable[Any]) -> None:
    """Let the options and arguments of a command complete names."""
    for param in params:
        param.shell_complete = partial(_offered, param, param.shell_complete)


def _offered(param: Any, usual: Callable[..., Any], ctx: Any, incomplete: str) -> Any:
    """Names that go on with what was typed; of a list with commas, its last one."""
    before, comma, last = incomplete.rpartition(",")
    known = [name for name in _known(param, ctx) if name.lower().startswith(last.lower())]
    return [Item(f"{before}{comma}{name}") for name in known] or usual(ctx, incomplete)


def _known(param: Any, ctx: Any) -> Iterable[str]:
    by_name = next((_NAMES[word] for word in (*param.opts, param.metavar) if word in _NAMES), tuple)
    return _choices(param.name, ctx) or by_name()


def _choices(name: str, ctx: Any) -> Sequence[str]:
    """What ``kernelcast kernel OP`` takes for a parameter that is one of a few words."""
    from kernelcast.ops import REGISTRY, parameters_of

    op = str(ctx.info_name).replace("-", "_")
    if ctx.parent is None or ctx.parent.info_name != "kernel" or op not in REGISTRY:
        return ()
    spec = parameters_of(REGISTRY[op]).get(name)
    return tuple(spec.options) if spec is not None and spec.type == "choice" else ()


def _gpus() -> Iterable[str]:
    from kernelcast.hardware import gpu_ids

    return gpu_ids()


def _models() -> Iterable[str]:
    from kernelcast.models.catalogue import model_ids

    return model_ids()


def _ops() -> Iterable[str]:
    from kernelcast.ops import REGISTRY

    return sorted(REGISTRY)


def _stacks() -> Iterable[str]:
    from kernelcast.stacks import stack_ids

    return stack_ids()


def _predictors() -> Iterable[str]:
    from kernelcast.forecast import PREDICTORS

    return PREDICTORS


def _fabrics() -> Iterable[str]:
    from kernelcast.hardware import fabrics

    return fabrics()


def _hosts() -> Iterable[str]:
    from kernelcast.schedule.timeline import host_ids

    return host_ids()


def _formats() -> Iterable[str]:
    from kernelcast.models.precision import WEIGHTS

    return WEIGHTS


# By the flag of an option; of an argument, by what help calls it
_NAMES: dict[str | None, Callable[[], Iterable[str]]] = {
    "--gpu": _gpus, "--gpus": lambda: (*_gpus(), "all"), "--stack": _stacks, "--model": _models,
    "--draft-model": _models, "--op": _ops, "--predictor": _predictors, "--fabric": _fabrics,
    "--between-nodes": _fabrics, "--host": _hosts, "--dtype": _formats, "--formats": _formats, "MODEL": _models,
    "[MODEL]": _models, "ID": _gpus,
}  # fmt: skip
