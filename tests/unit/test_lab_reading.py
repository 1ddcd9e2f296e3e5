"""Measured tables read: the schema follows the registry, rows are chosen, merged and named, left-out ones counted."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from measured_files import no_bad_row, write_parquet

import kernelcast
from kernelcast.errors import KernelcastError
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.ops import REGISTRY, Kernel, parameters_of
from kernelcast.ops.base import size
from kernelcast_lab import data as lab
from kernelcast_lab.data.importing import import_tables, left_out_whole
from kernelcast_lab.data.measurements import EVERYTHING
from kernelcast_lab.data.rules import RULES, rule_of

SLOW_US = 1e6  # slower than any bound of the small calls here


# --- schema


def test_schema_is_the_registry() -> None:
    columns = lab.columns_of()
    for kernel in REGISTRY.values():
        assert set(parameters_of(kernel)) <= set(columns)
    assert columns["m"] == "BIGINT" and columns["skew"] == "DOUBLE" and columns["causal"] == "BOOLEAN"
    assert columns["q_lens"] == "VARCHAR" and columns["latency_us"] == "DOUBLE"
    assert set(lab.columns_of(["gemm"])) >= {"op", "m", "n", "k", "dtype", "stack", "gpu", "campaign", "rotation"}
    assert "topk" not in lab.columns_of(["gemm"])


def test_a_new_kernel_needs_no_edit() -> None:
    class Trial(Kernel):
        op = "trial_op"
        sprockets: int = size("how many")

    try:
        assert lab.columns_of(["trial_op"])["sprockets"] == "BIGINT"
    finally:
        del REGISTRY["trial_op"]


def test_every_mapping_names_parameters_that_exist() -> None:
    for name, mapping in lab.kernel_tables().items():
        for op in mapping.ops:
            if op.op in REGISTRY:
                assert set(op.parameters) <= set(parameters_of(REGISTRY[op.op])), f"{name}: {op.op}"
        assert {rule for rule, _ in mapping.drops} <= set(RULES)


def test_the_prediction_path_does_not_import_the_lab() -> None:
    for path in Path(kernelcast.__file__).parent.glob("**/*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.startswith(("from kernelcast_lab", "import kernelcast_lab"))], path


# --- reading


@pytest.fixture
def cleaned(tmp_path: Path) -> Iterator[Path]:
    """A folder of cleaned tables: 2,000 GEMMs in the columns of PipeWeave's, one table that is not of kernels."""
    count = 2000
    columns: dict[str, list[Any]] = {
        "M": [1 + i for i in range(count)],
        "N": [512] * count,
        "K": [256] * count,
        "gpu": ["H20" if i % 2 else "H100" for i in range(count)],
        "split": ["train"] * count,
        "latency_us": [SLOW_US] * count,
    }
    columns["latency_us"][7], columns["latency_us"][8] = float("nan"), -1.0
    write_parquet(tmp_path / "tables/pipeweave/gemm_fp8.parquet", columns)
    write_parquet(tmp_path / "tables/pipeweave/e2e_real.parquet", {"gpu": ["H20", None], "total_s": [1.5, None]})
    write_parquet(tmp_path / "tables/raw/x.parquet", {"a": [1]})
    yield tmp_path / "tables"


def test_tables_and_plain_columns(cleaned: Path) -> None:
    assert lab.tables(cleaned) == ["pipeweave/e2e_real", "pipeweave/gemm_fp8"]
    plain = lab.read_table(cleaned, "pipeweave/e2e_real")
    assert plain["gpu"].tolist() == ["H20", None] and np.isnan(plain["total_s"][1])
    with pytest.raises(KernelcastError, match="read_table gives its columns"):
        lab.read(cleaned, "pipeweave/e2e_real")
    with pytest.raises(KernelcastError, match="unknown table 'pipeweave/gemm'"):
        lab.read(cleaned, "pipeweave/gemm")


def test_the_folder_can_come_from_the_environment(cleaned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELCAST_DATA", str(cleaned))
    assert len(lab.read_all(ops=["gemm"], gpus=["NVIDIA H20"])) == 999
    monkeypatch.delenv("KERNELCAST_DATA")
    with pytest.raises(KernelcastError, match="set KERNELCAST_DATA"):
        lab.tables()


def test_choosing_rows(cleaned: Path) -> None:
    everything = lab.read(cleaned, "pipeweave/gemm_fp8")
    assert len(everything) == 1998 and everything.dropped == {"bad_latency": 2}
    assert len(lab.read(cleaned, "pipeweave/gemm_fp8", where="m <= 5")) == 5
    assert len(lab.read(cleaned, "pipeweave/gemm_fp8", ops=["moe"])) == 0
    tenth = lab.read(cleaned, "pipeweave/gemm_fp8", sample=0.1)
    assert 120 < len(tenth) < 280
    assert lab.data_hash(tenth.columns) == lab.data_hash(lab.read(cleaned, "pipeweave/gemm_fp8", sample=0.1).columns)
    other = lab.read(cleaned, "pipeweave/gemm_fp8", sample=0.1, seed=1)
    assert lab.data_hash(tenth.columns) != lab.data_hash(other.columns)
    assert 120 < len(lab.read(cleaned, "pipeweave/gemm_fp8", sample=200)) < 280
    with pytest.raises(KernelcastError, match="sample must be"):
        lab.read(cleaned, "pipeweave/gemm_fp8", sample=0)
    with pytest.raises(KernelcastError, match="sprockets"):
        lab.read(cleaned, "pipeweave/gemm_fp8", where="sprockets = 1")


def test_cleaned_tables_become_canonical_files(cleaned: Path, tmp_path: Path) -> None:
    summary = import_tables(cleaned, tmp_path / "out")
    assert [line["rows"] for line in summary["tables"]] == [1998]
    direct = lab.read(cleaned, "pipeweave/gemm_fp8", sample=0.2, gpus=["h20"])
    stored = lab.read(tmp_path / "out", "pipeweave/gemm_fp8", sample=0.2, gpus=["NVIDIA H20"])
    assert len(direct) and lab.data_hash(direct.columns) == lab.data_hash(stored.columns)
    assert stored.dropped == {"bad_latency": 2} and stored.source == "pipeweave"
    assert left_out_whole(tmp_path / "out") == []
    with duckdb.connect() as connection:
        file = tmp_path / "out/pipeweave/gemm_fp8.parquet"
        kinds = {row[0]: row[1] for row in connection.execute(f"DESCRIBE SELECT * FROM '{file}'").fetchall()}
    assert kinds == lab.columns_of()


def test_merging_fills_what_a_table_lacks() -> None:
    def one(op: str, **cells: float) -> lab.Measurements:
        columns: dict[str, Any] = {"op": np.array([op], dtype=object), "gpu": np.array(["h20"], dtype=object)}
        columns |= {name: np.array([value]) for name, value in cells.items()}
        return lab.Measurements(columns, op, {op: {"duplicate": 1}})

    both = lab.merged([one("gemm", m=1.0), one("add", rows=2.0)])
    assert both.columns["op"].tolist() == ["gemm", "add"] and both.dropped == {"duplicate": 2}
    assert np.isnan(both.columns["rows"][0]) and np.isnan(both.columns["m"][1])
    assert both.source == "gemm, add" and both.ops == ("add", "gemm") and both.gpus == ("h20",)


def test_data_hash_names_the_rows() -> None:
    columns = {"op": np.array(["a", "b"], dtype=object), "m": np.array([1.0, 2.0])}
    same = lab.data_hash(columns)
    assert same == lab.data_hash({name: column[::-1] for name, column in reversed(columns.items())})
    assert same == lab.data_hash({**columns, "m": np.array([1, 2]), "new": np.array([np.nan, np.nan])})
    assert same != lab.data_hash({**columns, "m": np.array([2.0, 1.0])})
    assert same != lab.data_hash({name: column[:1] for name, column in columns.items()})
    assert same != lab.data_hash({"op": columns["op"], "k": columns["m"]})


def test_messages_of_the_table_reader_have_rules() -> None:
    calls: dict[str, list[Any]] = {
        "op": ["gemm", "gemm", "gemm", "moe", "gemm", "gemm"],
        "gpu": ["a100_sxm"] * 6,
        "dtype": ["fp8", "bf16", "bf16", "bf16", "bf16", "fp9"],
        "m": [1, 0, 2**30, None, None, 1],
        "n": [1, 1, 2**30, None, 1, 1],
        "k": [1, 1, 2**10, None, 1, 1],
        **{name: [None, None, None, 8, None, None] for name in ("tokens", "hidden", "inter", "experts", "topk")},
        "ep": [None, None, None, 3, None, None],
    }
    columns = {name: np.array(cells, dtype=object) for name, cells in calls.items()}
    _, bad = predict_columns(columns, None)
    assert {row: rule_of(message) for row, message in bad.messages.items()} == {
        0: "not_on_gpu", 1: "out_of_range", 2: "too_large", 3: "conflict", 4: "missing_parameter", 5: "unknown_dtype",
    }  # fmt: skip


def test_choice_has_defaults() -> None:
    assert dataclasses.asdict(EVERYTHING) == {"ops": None, "gpus": None, "where": None, "sample": None, "seed": 0}


# --- the real folder, where there is one

REAL = os.environ.get("KERNELCAST_DATA")


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="KERNELCAST_DATA names no folder of measured tables")
@pytest.mark.parametrize("name", lab.tables(REAL) if REAL else ["none"])
def test_every_real_table(name: str) -> None:
    mapping = lab.kernel_tables().get(name)
    if mapping is None:
        assert lab.read_table(REAL, name)
        return
    found = lab.read(REAL, name, sample=2000)
    if not any(op.op in REGISTRY for op in mapping.ops):
        assert set(found.dropped) == {"no_kernel_family"} and not len(found)
        return
    assert len(found) > 0
    no_bad_row(found)
    assert set(found.dropped) <= set(RULES)
