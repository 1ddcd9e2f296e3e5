"""Looking up a model: a bundled id, a Hugging Face id, a config.json, or an entry of the local Hugging Face cache."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.models.architecture import Architecture
from kernelcast.models.config import parse

MODELS = Path(__file__).parent / "configs"

# Tuned versions of a model run the same layers. Names that mean other weights in memory (-FP8, -NVFP4, -AWQ) are
# not here: they need their config (for some, a bundled one with a ``_base``).
_TUNED = re.compile(r"(-(instruct|chat|it|pt|base|hf|thinking))+$")


def model(name_or_path: str | os.PathLike[str]) -> Architecture:
    """The architecture of a model by bundled id, Hugging Face id, path of a config.json (or its folder), or cache."""
    name, file = _locate(os.fspath(name_or_path))
    return _bundled(file.stem) if file.parent == MODELS else parse(_load(file), name=name)


def bundled(stem: str) -> dict[str, Any]:
    """The file of a bundled id, merged with its ``_base``; keys of this package begin with ``_``."""
    return _load(MODELS / f"{stem}.json")


def config(name_or_path: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """The name and the config.json of a model, looked up as in ``model``; without this package's keys (``_id``)."""
    name, file = _locate(os.fspath(name_or_path))
    return name, {key: value for key, value in _load(file).items() if not key.startswith("_")}


def _locate(text: str) -> tuple[str, Path]:
    """A model's name and its file."""
    stem = _stem(text)
    if stem is not None:
        return stem, MODELS / f"{stem}.json"
    path = Path(text).expanduser()
    if path.exists() or path.suffix == ".json" or text.startswith((".", "/", "~")):
        return _at_path(path)
    cached = _cached_config(text)
    if cached is not None:
        return text, cached
    names = [bundled(stem)["_id"] for stem in model_ids()] if "/" in text else model_ids()
    raise KernelcastError(f"{unknown('model', text, names)}; or give the path of the model's config.json")


def hub_name(name_or_path: str | os.PathLike[str]) -> str:
    """The name that an engine loads: a Hugging Face id where known, else the name or folder as given."""
    text = os.fspath(name_or_path)
    stem = _stem(text)
    if stem is None:
        path = Path(text).expanduser()
        return str(path.parent) if path.is_file() else text
    if "/" in text:
        return text
    known = str(bundled(stem)["_id"])
    tuned = _TUNED.search(text.strip().lower())
    if tuned is None or _TUNED.search(known.lower()):
        return known
    return known + "".join(f"-{part if len(part) < 3 else part.title()}" for part in tuned[0].split("-")[1:])


@functools.cache
def model_ids() -> tuple[str, ...]:
    """The bundled ids, one a file."""
    return tuple(sorted(p.stem for p in MODELS.glob("*.json")))


@functools.cache
def _bundled(stem: str) -> Architecture:
    return parse(bundled(stem), name=stem)


def _fold(name: str) -> str:
    """Lower case, without the endings of tuned versions."""
    return _TUNED.sub("", name.strip().lower())


def _stem(text: str) -> str | None:
    """The bundled id that a name means: the id itself, a spelling of it, else without the endings of tuned versions."""
    name = text.strip().lower()
    if name in model_ids():  # the usual case opens no other file
        return name
    return _index().get(name) or _index().get(_fold(name))


@functools.cache
def _index() -> dict[str, str]:
    """Other spellings -> bundled id: the Hugging Face id with and without its organisation, and aliases.

    A Hugging Face id of another organisation is not taken for the original: its files may differ.
    """
    exact: dict[str, str] = {}
    tuned: dict[str, str] = {}
    for stem in model_ids():
        config = bundled(stem)
        for name in (config["_id"], *config.get("_aliases", ())):
            for spelling in (name, name.rpartition("/")[2]):
                exact.setdefault(spelling.strip().lower(), stem)
                tuned.setdefault(_fold(spelling), stem)
    return tuned | exact


def _at_path(path: Path) -> tuple[str, Path]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise KernelcastError(f"no config.json at {str(path)!r}; give a config.json or a folder that holds one")
    return file.parent.resolve().name if file.name == "config.json" else file.stem, file


def _load(file: Path) -> dict[str, Any]:
    """A config; a bundled one may name another as its ``_base`` and say only what differs: its names, its formats."""
    config = _read(file)
    if file.parent != MODELS or "_base" not in config:
        return config
    base = _load(MODELS / f"{config['_base']}.json")
    return {**{key: value for key, value in base.items() if key != "_aliases"}, **config}


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KernelcastError(f"{str(file)!r} is not readable as JSON ({error}); a config.json is needed") from error
    if not isinstance(config, dict):
        raise KernelcastError(f"{str(file)!r} holds a {type(config).__name__}; a config.json is a JSON object")
    return config


def _hub_cache() -> Path:
    """Where huggingface_hub keeps its files, by the same variables that it reads."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(home).expanduser() / "hub"


def _cached_config(name: str) -> Path | None:
    """The config of this id in the cache: of the snapshot that refs/main names, else of the newest."""
    wanted, cache = "models--" + name.strip().lower().replace("/", "--"), _hub_cache()
    for entry in sorted(cache.iterdir()) if cache.is_dir() else ():
        if entry.name.lower() != wanted:
            continue
        if snapshots := sorted(entry.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime):
            main = entry / "refs" / "main"
            commit = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
            return next((path for path in snapshots if path.parent.name == commit), snapshots[-1])
    return None
