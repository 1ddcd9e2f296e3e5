"""The reference of commands and of the Python API, made from the program itself."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import typer
from generated import MADE, Cell, prose, table

import kernelcast


def commands() -> str:
    """Every command with its options, as ``--help`` has them."""
    from kernelcast.app.cli.app import build

    group = typer.main.get_command(build())
    listed = group.commands  # type: ignore[attr-defined]
    text = [
        f"# Commands\n\n{MADE}\nEvery command has `--help`; those that answer have `--json`. Exit codes: 0 well, 2 the "
        "input is wrong (one line on standard error says what is), 130 interrupted.\n",
        table(
            ("command", "what it does"),
            [(f"[`{name}`](#{name})", _first(one.help)) for name, one in sorted(listed.items())],
        ),
    ]
    for name, one in sorted(listed.items()):
        text.append(f"\n## {name} {{ #{name} }}\n")
        text += _command(f"kernelcast {name}", one, within=name == "kernel")
    return "\n".join(text)


def _first(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _command(called: str, one: Any, within: bool = False) -> list[str]:
    arguments = [p for p in one.params if p.param_type_name == "argument"]
    words = " ".join(
        (p.metavar or p.name.upper()) if p.required else f"[{p.metavar or p.name.upper()}]" for p in arguments
    )
    children = getattr(one, "commands", None)
    text = [
        f"{prose(one.help or '')}\n",
        f"```text\n{called} {'COMMAND ' if children else ''}{words} [OPTIONS]\n```\n".replace("  ", " "),
    ]
    if arguments:
        text.append(
            table(
                ("argument", "what"),
                [(f"`{p.metavar or p.name.upper()}`", getattr(p, "help", "") or "") for p in arguments],
            )
        )
    panels: dict[str, list[Any]] = {}
    for p in one.params:
        if p.param_type_name == "option" and not p.hidden and "--help" not in p.opts:
            panels.setdefault(getattr(p, "rich_help_panel", None) or "Options", []).append(p)
    for panel, options in panels.items():
        if panel != "Options":
            text.append(f"\n**{panel}**\n")
        text.append(table(("option", "what", "default"), [_option(p) for p in options]))
    if examples := getattr(one, "examples", ()):
        text.append("\n```sh\n" + "\n".join(examples) + "\n```\n")
    if within:
        text.append("\nOne command an op: [ops](ops.md) lists them with their parameters.\n")
    elif children:
        for name, child in sorted(children.items()):
            text.append(f"\n### {called.removeprefix('kernelcast ')} {name}\n")
            text += _command(f"{called} {name}", child)
    return text


def _option(p: Any) -> tuple[Cell, ...]:
    names = ", ".join(f"`{name}`" for name in [*p.opts, *p.secondary_opts])
    default = p.default() if callable(p.default) else p.default
    shown = None if default in (None, False, (), []) or repr(default).startswith("Sentinel") else f"`{default}`"
    return names, " ".join((p.help or "").split()), shown or ("needed" if p.required else "")


def api() -> str:
    """The public names of the package, by mkdocstrings."""
    # where griffe finds a name that the package imports when it is asked for
    elsewhere = {"trace": "kernelcast.tracing.trace"}
    text = [
        f"# Python\n\n{MADE}\n`import kernelcast as kc`; everything below is `kc.NAME`. Kernel classes (`kc.Gemm`, "
        "`kc.Attention`, …) are the [ops](ops.md). `infer`, `simulate`, `compare` and `plan` take the words of their "
        "[commands](cli.md).\n"
    ]
    for name in kernelcast.__all__:
        found = getattr(kernelcast, name, None) if name not in elsewhere or find_spec("torch") else None
        path = elsewhere.get(name) or f"{found.__module__}.{getattr(found, '__qualname__', name)}"
        text.append(f"\n## {name} {{ #{name} }}\n")
        if getattr(found, "__module__", "") == "kernelcast.app.api" and callable(found):
            text += _asked(name, found, inspect.signature(found))
        else:
            text += [_signature(name, found), f"::: {path}\n"]
    return "\n".join(text)


def _word(word: inspect.Parameter) -> str:
    kind = "" if word.annotation is word.empty else f": {word.annotation}"
    value = repr(word.default)
    if len(value) > 40:  # a value with many fields of its own
        value = value.partition("(")[0] + "()"
    default = "" if word.default is word.empty else f" = {value}"
    return f"{word.name}{kind}{default}"


def _signature(name: str, found: Any) -> str:
    """How it is called, a word a line where there are several."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # an exception, or what only another distribution can tell
        return ""
    words = [_word(word) for word in signature.parameters.values()]
    gives = signature.return_annotation
    inside = f"\n    {f',{chr(10)}    '.join(words)},\n" if len(words) > 2 else ", ".join(words)
    back = (
        f" -> {gives if isinstance(gives, str) else gives.__name__}"
        if gives not in (inspect.Signature.empty, None)
        else ""
    )
    return f"```python\nkc.{name}({inside}){back}\n```\n"


def _asked(name: str, found: Any, signature: Any) -> list[str]:
    """A function that takes the words of a command: made on import, so that only Python itself can tell it."""
    help_of = dict(line.partition(": ")[::2] for line in (found.__doc__ or "").splitlines()[2:])
    rows = [
        (f"`{p.name}`", "needed" if p.default is p.empty else f"`{p.default!r}`", help_of.get(p.name, ""))
        for p in signature.parameters.values()
    ]
    first = (found.__doc__ or "").splitlines()[0]
    return [f"{first}\n", table(("word", "default", "what"), rows)]
