"""Recipes of weights: what ships is what made the shipped weights, a file of one's own works, bad ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.learned import WEIGHTS, load
from kernelcast.forecast.network import read_tensors
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.toml_folder import ids_in
from kernelcast_lab.data import Measurements, data_hash, write_canonical
from kernelcast_lab.fit.dataset import build
from kernelcast_lab.fit.families import fitting_columns
from kernelcast_lab.fit.fit import save_about
from kernelcast_lab.fit.packing import pack
from kernelcast_lab.fit.recipes import FAMILIES, RECIPES, changed, read_recipe, recipe, recipes_of

Run = Callable[..., tuple[int, str, str]]
NETWORK = "hidden = [{}]\nepochs = {}\nbatch = 128\nlearning_rate = 3e-3\nweight_decay = 1e-4\n"
NETWORK += "gpu_dropout = 0.3\nword_dropout = 0.1\nnoise = 0.0\n"
SMALL = f"""family = "gemm"
networks = 1
transfer_networks = 1
rows_left_out = 100
least_share = 0.08
most_repeats = 20
rows = 0
seed = 0
[data]
sources = []
leave_out = []
not_fitted = []
fitted_still = []
event_timed = true
sweeps = false
slower_configs = 0
slower_of = []
[main]
{NETWORK.format("32, 32", 40)}
[transfer]
{NETWORK.format("16", 5)}
[ceiling]
{NETWORK.format("16", 5)}
"""


def measured(folder: Path, rows: int = 600) -> Path:
    """Products that take 1.5 times what physics says, in a folder of measured tables."""
    rng = np.random.default_rng(3)
    columns: dict[str, Any] = {side: np.floor(2 ** rng.uniform(6, 13, rows)) for side in ("m", "n", "k")}
    words = {
        "op": "gemm",
        "dtype": "bf16",
        "stack": "vllm",
        "kernel_source": "invented",
        "source": "mine",
        "split": None,
    }
    columns |= {name: np.full(rows, word, dtype=object) for name, word in words.items()}
    columns["gpu"] = np.array(["a100_sxm", "h200_sxm"], dtype=object)[rng.integers(0, 2, rows)]
    physics, _ = predict_columns(columns, None, Conditions(predictor="generic"))
    columns["latency_us"] = 1.5 * physics["predicted_us"]
    (folder / "mine").mkdir(parents=True)
    write_canonical(Measurements(columns, "mine"), folder / "mine" / "products.parquet")
    return folder


def test_a_recipe_makes_weights_that_answer(run: Run, tmp_path: Path) -> None:
    data, out = measured(tmp_path / "data"), tmp_path / "weights"
    (tmp_path / "small.toml").write_text(SMALL)
    code, _, err = run("fit", "--recipe", tmp_path / "small.toml", "--data", data, "-o", out, "--version", "mine 1")
    assert code == 0, err
    call = ("kernel", "gemm", "--m", "512", "--n", "4096", "--k", "4096", "--stack", "vllm", "--gpu", "h200_sxm")
    code, told, err = run(*call, "--weights", out, "--json")
    assert code == 0, err
    answer = json.loads(told)
    plain = json.loads(run(*call, "--predictor", "generic", "--json")[1])
    assert answer["predictor"] == "learned-mine 1" and answer["support"] == "seen"
    assert answer["time_s"] == pytest.approx(1.5 * plain["time_s"], rel=0.1)
    weights = load(out, "gemm")
    assert weights is not None
    kinds = {entry.gpu: entry for entry in weights.evidence.entries}
    assert set(kinds) == {"a100_sxm", "h200_sxm"} and sum(entry.calls for entry in kinds.values()) == 600
    assert kinds["h200_sxm"].tested and kinds["h200_sxm"].error < 0.1  # type: ignore[operator]
    assert weights.about["settings"]["main"]["epochs"] == 40
    # another run into the same folder keeps the family, and tells of the other version
    code, _, err = run("fit", "--recipe", tmp_path / "small.toml", "--data", data, "-o", out, "--version", "mine 2")
    assert code == 0 and "gemm is in" in err and "gemm in" in err and "other versions than mine 2" in err
    about = json.loads((out / "about.json").read_text())
    assert about["version"] == "mine 2" and about["families"]["gemm"]["version"] == "mine 1"
    assert save_about(out, "mine 1") == []


def test_there_is_a_recipe_for_each_family() -> None:
    assert {name for name in ids_in(RECIPES) if not name.startswith("_")} == set(FAMILIES)
    assert all(recipe(name).family == name for name in FAMILIES)
    assert list(recipes_of((), ())) == list(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_weights_were_made_by_their_recipe(family: str) -> None:
    """Their settings, but for how many processes made them. Those that were made before there was a fine-tuning do not
    speak of it."""
    made = read_tensors(WEIGHTS / f"{family}.safetensors")[1]["about"]["settings"]
    told = json.loads(json.dumps(asdict(recipe(family).settings)))
    assert {"finetune": None, "finetune_share": 0.0, **made, "workers": 1} == told


def test_options_change_a_recipe() -> None:
    settings = changed(recipe("gemm").settings, epochs=2, rows=100, seed=None)
    assert (settings.main.epochs, settings.rows, settings.seed) == (2, 100, 0)
    assert settings.main.batch == 8192 and settings.transfer == recipe("gemm").transfer


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rows_left_out = 100\n", "", "missing rows_left_out; unknown nothing"),
        ("seed = 0\n", "seed = 0\nspeed = 3\n", "missing nothing; unknown speed"),
        ("hidden = [16]", "hiden = [16]", "missing hidden; unknown hiden"),
        ("hidden = [16]", "hidden = 16", "hidden = 16 is not tuple"),
        ("epochs = 40", "epochs = 0", "epochs = 0 is not int from 1 on"),
        ("batch = 128", "batch = 1.5", "batch = 1.5 is not int"),
        ("sweeps = false", "sweeps = 0", "sweeps = 0 is not bool"),
        ('"gemm"', '"gem"', "unknown family 'gem'"),
        ("networks = 1", "networks = ", "small.toml"),
    ],
)
def test_bad_recipes_are_refused_in_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in SMALL
    path = tmp_path / "small.toml"
    path.write_text(SMALL.replace(old, new))
    with pytest.raises(KernelcastError, match=said) as error:
        read_recipe(path)
    assert "\n" not in str(error.value)


def test_a_family_has_one_recipe(tmp_path: Path) -> None:
    for name in ("one.toml", "two.toml"):
        (tmp_path / name).write_text(SMALL)
    with pytest.raises(KernelcastError, match="more than one recipe"):
        recipes_of((), [tmp_path / "one.toml", tmp_path / "two.toml"])
    with pytest.raises(KernelcastError, match=r"NAME\.toml"):
        read_recipe(tmp_path / "three.toml")


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same cells in the same order; a column that no row fills counts for nothing."""
    for name in set(one) | set(other):
        filled = next(columns[name] for columns in (one, other) if name in columns)
        words = filled.dtype == object
        empty = np.full(len(one["op"]), None if words else np.nan, dtype=filled.dtype)
        a, b = one.get(name, empty), other.get(name, empty)
        assert a.tolist() == b.tolist() if words else np.array_equal(a, b, equal_nan=True), name
    assert data_hash(one) == data_hash(other)


def test_a_pack_has_the_rows_of_the_tables(run: Run, tmp_path: Path) -> None:
    """Of our own measurements, and of a source with a split of its own, whose test rows stay out."""
    here = Path(__file__).parents[2] / "validation"
    theirs = fitting_columns([here], "conv2d")
    rows = {name: column[:200] for name, column in theirs.items() if name not in ("dilation", "groups", "rotation")}
    rows["source"] = np.full(200, "neusight", dtype=object)
    rows["split"] = np.array(["train", "test"] * 100, dtype=object)
    rows["stack"] = np.full(200, "torch_eager", dtype=object)
    write_at = tmp_path / "tables" / "neusight"
    write_at.mkdir(parents=True)
    write_canonical(Measurements(rows, "neusight"), write_at / "rows.parquet")
    folders = ("--data", here, "--data", tmp_path / "tables")
    code, told, err = run("data", "pack", *folders, "-o", tmp_path / "pack", "--family", "conv2d", "--json")
    assert code == 0, err
    line, *others = json.loads(told)
    assert all("_again" in other["file"] for other in others)  # what was measured a second time
    assert line["rows"] == len(theirs["op"]) + 100
    back = fitting_columns([tmp_path / "pack"], "conv2d")
    same(fitting_columns([here, tmp_path / "tables"], "conv2d"), back)
    assert set(back["split"][back["source"] == "neusight"]) == {"train"}
    assert Path(line["file"]).stat().st_size < 0.5 * (here / "kernelcast" / "h200_sxm.parquet").stat().st_size


@pytest.mark.parametrize("family", ["attention_backward", "moe_gemm"])
def test_a_pack_has_sweeps_too(tmp_path: Path, family: str) -> None:
    here = Path(__file__).parents[2] / "validation"
    pack([here], tmp_path, [family])
    assert len(list(tmp_path.glob("*.npz"))) == (family == "moe_gemm")
    same(fitting_columns([here], family), fitting_columns([tmp_path], family))


def test_features_are_the_same_by_any_number_of_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kernelcast_lab.fit import dataset

    monkeypatch.setattr(dataset, "_SHARE_CALLS", 200)
    columns = fitting_columns([measured(tmp_path)], "gemm")
    one, two = build(columns, "gemm"), build(columns, "gemm", workers=2)
    assert one.names == two.names and np.array_equal(one.values, two.values) and np.array_equal(one.rows, two.rows)
