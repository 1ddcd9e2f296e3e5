"""Prices: what ships, what a user gives, and what nobody knows."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu_ids
from kernelcast.hardware.prices import KINDS, SHIPPED, Price, read_prices


@pytest.mark.parametrize("kind", KINDS)
def test_every_price_that_ships_has_its_date_and_source(kind: str) -> None:
    prices = read_prices(kind=kind)
    assert set(prices) <= set(gpu_ids()) and {"h100_sxm", "h200_sxm", "b200_sxm", "a100_sxm"} <= set(prices)
    for name, price in prices.items():
        assert 0.05 < price.usd_per_hour < 20 and price.date.startswith("20") and "https://" in price.source, name


def test_the_file_is_in_order_and_reserving_is_no_dearer() -> None:
    names = list(tomllib.loads(SHIPPED.read_text()))
    assert names == sorted(names)
    on_demand, reserved = read_prices(), read_prices(kind="reserved")
    # lists of different clouds: a reserved GPU of one may cost a little more than another's cheapest by the hour
    assert all(reserved[name].usd_per_hour <= 1.05 * on_demand[name].usd_per_hour for name in reserved)


def test_what_nobody_listed_is_not_there() -> None:
    assert "gb200" in read_prices() and "gb200" not in read_prices(kind="reserved")


def test_a_file_of_ones_own_may_have_one_price_or_both(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(
        '[h100]\nusd_per_hour = 2\ndate = "today"\nsource = "ours"\n'
        '[h200_sxm.reserved]\nusd_per_hour = 3\ndate = "today"\nsource = "ours"\n'
    )
    ours = {"h100_sxm": Price(2, "today", "ours")}
    assert read_prices(file) == ours
    assert read_prices(file, kind="reserved") == ours | {"h200_sxm": Price(3, "today", "ours")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[h100_sxm]\nusd_per_hour = 2\n", "needs usd_per_hour, date, source"),
        ("[h100_sxm.reserved]\nusd_per_hour = 2\n", r"\[h100_sxm.reserved\] needs"),
        ('[h100_sxm.spot]\nusd_per_hour = 2\ndate = ""\nsource = ""\n', "or on_demand and reserved"),
        ('[h9000]\nusd_per_hour = 2\ndate = ""\nsource = ""\n', "unknown gpu 'h9000'"),
        ('[h100_sxm]\nusd_per_hour = -1\ndate = ""\nsource = ""\n', "above 0"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(KernelcastError, match=said):
        read_prices(file)


def test_a_kind_that_is_none() -> None:
    with pytest.raises(KernelcastError, match="unknown kind of price 'spot'; known: on_demand, reserved"):
        read_prices(kind="spot")


def test_prices_with_commas_and_a_dict_of_them() -> None:
    found = read_prices(given=["h100=2,4090=0.4", "a100=1"])
    assert [found[name].usd_per_hour for name in ("h100_sxm", "rtx_4090", "a100_sxm")] == [2, 0.4, 1]
    rows = kc.compare("llama-3.2-1b", "4090", batch=1, price={"4090": 0.5}).rows  # type: ignore[arg-type]
    assert rows[0].best is not None and rows[0].best.usd_per_hour == 0.5
