"""What a GPU costs by the hour: the file that ships, a user's own, or single prices on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import gpu
from kernelcast.toml_folder import read_toml

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
    """Prices by GPU id: of the file (None: the one that ships), with pairs like ``h100_sxm=2.5`` in place of its
    numbers. A GPU without a price of this type is left out: none is estimated from the other type."""
    if kind not in KINDS:
        raise unknown("kind of price", kind, KINDS)
    path = path or SHIPPED
    listed = {gpu(name).id: _of_gpu(path, name, entry) for name, entry in read_toml(path).items()}
    prices = {name: by_kind[kind] for name, by_kind in listed.items() if kind in by_kind}
    for pair in (each for text in given for each in text.split(",")):
        name, equals, text = pair.partition("=")
        try:
            value = float(text.strip().removeprefix("$"))
        except ValueError:
            equals = ""
        if not equals:
            raise KernelcastError(f"`price` takes GPU=USD per hour, as in h100_sxm=2.5, not {pair!r}")
        prices[gpu(name.strip()).id] = Price(value, "", "given with --price")
    return prices


def _of_gpu(path: Path, name: str, entry: object) -> dict[str, Price]:
    """Prices of one GPU by type. A table without types is one price for both."""
    if isinstance(entry, Mapping) and entry and set(entry) <= set(KINDS):
        return {kind: _price(path, f"{name}.{kind}", values) for kind, values in entry.items()}
    return dict.fromkeys(KINDS, _price(path, name, entry))


def _price(path: Path, name: str, values: object) -> Price:
    wanted = [field.name for field in fields(Price)]
    if not isinstance(values, Mapping) or sorted(values) != sorted(wanted):
        raise KernelcastError(f"{path}: [{name}] needs {', '.join(wanted)}, or {' and '.join(KINDS)} with these")
    return Price(values["usd_per_hour"], str(values["date"]), str(values["source"]))
