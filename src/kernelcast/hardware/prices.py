"""What a GPU costs by the hour: the file that ships, a user's own, or single prices on top."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import gpu

SHIPPED = Path(__file__).with_name("prices.toml")
KINDS = ("on_demand", "reserved")


@dataclass(frozen=True)
class Price:
    """Of one GPU for an hour, when it was read, and where."""

    usd_per_hour: float
    date: str
    source: str

    def __post_init__(self) -> None:
        value = self.usd_per_hour
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise KernelcastError(f"a price is a number of USD per GPU-hour above 0, not {value!r}")


def read_prices(path: Path | None = None, given: Sequence[str] = (), kind: str = "on_demand") -> dict[str, Price]:
    """By GPU id, of those that have one of this kind: of the file (None: the one that ships), with prices like
    ``h100_sxm=2.5`` in place of its own. What nobody priced is not there: no price is guessed from another kind."""
    if kind not in KINDS:
        raise unknown("kind of price", kind, KINDS)
    found = _of_file(path or SHIPPED, kind)
    for pair in given:
        name, equals, text = pair.partition("=")
        try:
            value = float(text.strip().removeprefix("$"))
        except ValueError:
            equals = ""
        if not equals:
            raise KernelcastError(f"--price takes GPU=USD per hour, as in h100_sxm=2.5, not {pair!r}")
        found[gpu(name.strip()).id] = Price(value, "", "given with --price")
    return found


def _of_file(path: Path, kind: str) -> dict[str, Price]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KernelcastError(f"no file {path}; prices are a TOML file like {SHIPPED}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KernelcastError(f"{path} is not readable as TOML: {error}") from None
    found = {gpu(name).id: _kinds(path, name, values) for name, values in tables.items()}
    return {name: prices[kind] for name, prices in found.items() if kind in prices}


def _kinds(path: Path, name: str, values: object) -> dict[str, Price]:
    """Prices of one GPU. A table without kinds is somebody's one price, whatever kind is asked for."""
    if isinstance(values, Mapping) and values and set(values) <= set(KINDS):
        return {kind: _price(path, f"{name}.{kind}", own) for kind, own in values.items()}
    return dict.fromkeys(KINDS, _price(path, name, values))


def _price(path: Path, name: str, values: object) -> Price:
    known = [field.name for field in fields(Price)]
    if not isinstance(values, Mapping) or sorted(values) != sorted(known):
        raise KernelcastError(f"{path}: [{name}] needs {', '.join(known)}, or {' and '.join(KINDS)} with these")
    return Price(values["usd_per_hour"], str(values["date"]), str(values["source"]))
