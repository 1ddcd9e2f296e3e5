"""Looking up a model: a bundled id, a Hugging Face id, a config.json, or an entry of the local Hugging Face cache."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.models import names
from kernelcast.models.architecture import Architecture
from kernelcast.models.config import parse
from kernelcast.models.names import Meaning
from kernelcast.toml_folder import read_toml

MODELS = Path(__file__).parent / "configs"
TRACED = Path(__file__).with_name("traced.toml")

# Endings of tuned versions, which run the same layers
_TUNED = re.compile(r"(-(instruct|chat|it|pt|base|hf|thinking))+$")


def model(name_or_path: str | os.PathLike[str]) -> Architecture:
    """The architecture of a model by bundled id, Hugging Face id, path of a config.json (or its folder), cache, or by a
    name that says whose layers and which number format it has (``names.py``)."""
    text = os.fspath(name_or_path)
    stem = _stem(text)
    if stem is not None:
        return _bundled(stem)
    name, config = _found(text)
    return parse(config, name=name)


def bundled(stem: str) -> dict[str, Any]:
    """The file of a bundled id, merged with its ``_base``; keys of this package begin with ``_``."""
    own = _read(MODELS / f"{stem}.json")
    if "_base" not in own:
        return own
    return {**{key: value for key, value in bundled(own["_base"]).items() if key != "_aliases"}, **own}


def config(name_or_path: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """The name and the config.json of a model, looked up as in ``model`` or among those that are traced alone; without
    this package's keys (``_id``)."""
    text = os.fspath(name_or_path)
    name, config = _traced(text) or _found(text)
    return name, {key: value for key, value in config.items() if not key.startswith("_") or key == "_class_name"}


@functools.cache
def traced_table() -> dict[str, Any]:
    """Models that are traced and not read by ``model``, and the inputs of denoisers."""
    return read_toml(TRACED)


def _traced(text: str) -> tuple[str, dict[str, Any]] | None:
    """A model that is traced alone, where the name is of one and no file's."""
    key = names.key_of(names.parts_of(text)[1])
    stem = next((stem for stem, spellings in traced_names().items()
                 if key in {names.key_of(names.parts_of(each)[1]) for each in spellings}), None)  # fmt: skip
    return (stem, traced_table()["models"][stem]["config"]) if stem and not _exists(Path(text)) else None


def traced_names() -> dict[str, tuple[str, ...]]:
    """What the models that are traced alone are called, by their names here."""
    return {stem: (stem, entry["id"], *entry["also"]) for stem, entry in traced_table()["models"].items()}


def _found(text: str) -> tuple[str, dict[str, Any]]:
    """A model's name and its config."""
    stem = _stem(text)
    if stem is not None:
        return stem, bundled(stem)
    path = Path(text).expanduser()
    if _exists(path) or path.suffix == ".json" or text.startswith((".", "/", "~")):
        return _at_path(path)
    cached = _cached_config(text)
    if cached is not None:
        return text, _checkpoint(cached)
    if found := _meaning(text):
        return text.strip() if found.ending else found.stem, _in_format(bundled(found.stem), found)
    names.refuse_other_routes(text)
    raise unknown_model(text)


def unknown_model(text: str) -> KernelcastError:
    """The error for a name that no model is known by."""
    near = [hub if "/" in text else stem for stem, hub in names.nearest_names(text, _spellings())]
    hint = f" (did you mean {', '.join(dict.fromkeys(near))}?)" if near else ""
    return KernelcastError(
        f"unknown model {text!r}{hint}; `kernelcast models` lists {len(model_ids())}; or give the path of the model's "
        "config.json"
    )


def _meaning(text: str) -> Meaning | None:
    return names.meaning(text, _spellings())


def _in_format(config: dict[str, Any], found: Meaning) -> dict[str, Any]:
    """A bundled config in the number format that a name says; that of the checkpoint itself, where it is that one."""
    own = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    if not found.ending or own.get("quant_method") == found.ending:
        return config
    rest = {key: value for key, value in config.items() if key != "expert_dtype"}
    return {**rest, "quantization_config": dict(found.quantization) or None}


def hub_name(name_or_path: str | os.PathLike[str]) -> str:
    """The name that an engine loads: a Hugging Face id where known, else the name or folder as given."""
    text = os.fspath(name_or_path)
    stem = _stem(text)
    path = Path(text).expanduser()
    if stem is None and _exists(path):
        return str(path.parent) if path.is_file() else text
    found = None if stem or "/" in text else _meaning(text)
    known = str(bundled(stem)["_id"]) if stem else found.hub if found and not found.ending else ""
    if "/" in text or "/" not in known:
        return text
    tuned = _TUNED.search(names.parts_of(text)[1])
    if tuned is None or _TUNED.search(known.lower()):
        return known
    return known + "".join(f"-{part if len(part) < 3 else part.title()}" for part in tuned[0].split("-")[1:])


def names_of(stem: str) -> tuple[str, ...]:
    """What a bundled model is called, and other models that have its layers."""
    config = bundled(stem)
    return (stem, config["_id"], *config.get("_aliases", ()), *names.same_layers().get(stem, ()))


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
    """Names of the bundled models themselves -> bundled id: the Hugging Face id with and without its organisation, and
    aliases. They come before a file in the Hugging Face cache."""
    exact: dict[str, str] = {}
    tuned: dict[str, str] = {}
    for stem in model_ids():
        config = bundled(stem)
        for name in (config["_id"], *config.get("_aliases", ())):
            for spelling in (name, name.rpartition("/")[2]):
                exact.setdefault(spelling.strip().lower(), stem)
                tuned.setdefault(_fold(spelling), stem)
    return tuned | exact


@functools.cache
def _spellings() -> names.Index:
    """Spellings of the bundled models and of those with the same layers; not of bundled files that only say a format,
    as its ending says it too."""
    known: list[tuple[str, str, str]] = []
    for stem in model_ids():
        own = _read(MODELS / f"{stem}.json")
        if "_base" not in own or "quantization_config" not in own:
            known += [(name, stem, name if "/" in name else own["_id"])
                      for name in (stem, own["_id"], *own.get("_aliases", ()))]  # fmt: skip
    known += [(name, stem, name) for stem, others in names.same_layers().items() for name in others]
    return names.build_index(known)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than a file's name can be
        return False


def _at_path(path: Path) -> tuple[str, dict[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise KernelcastError(f"no config.json at {str(path)!r}; give a config.json or a folder that holds one")
    return file.parent.resolve().name if file.name == "config.json" else file.stem, _checkpoint(file)


def _checkpoint(file: Path) -> dict[str, Any]:
    """A config.json; older exports of Model-Optimizer say the formats in a file beside it."""
    config, beside = _read(file), file.with_name("hf_quant_config.json")
    return with_formats(config, _read(beside)) if file.name == "config.json" and beside.is_file() else config


def with_formats(config: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """``config`` with the formats that the file beside it says, where it says none itself."""
    if "quantization_config" in config:
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **beside.get("quantization", {})}}


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
    for hub in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if hub in os.environ:
            return Path(os.environ[hub]).expanduser()
    home = os.environ.get("HF_HOME", os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface")
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
