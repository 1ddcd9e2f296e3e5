"""NeuSight's, PipeWeave's and Vidur's files, and every checkout: imported whole or not at all.

All files are made here; every number in them is invented.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from measured_files import imported, no_bad_row, pipeweave, rows_of, write_csv

from kernelcast.errors import KernelcastError
from kernelcast_lab import data as lab
from kernelcast_lab.data.importing import import_checkout
from kernelcast_lab.data.shared import SOURCES


def test_neusight_import(tmp_path: Path) -> None:
    data = tmp_path / "NeuSight/scripts/asplos/data"
    common: dict[str, list[Any]] = {"Torch Version": ["p2.1.0"] * 2, "Kernel Name": ["volta_sgemm_64x64_nn"] * 2}
    linear: dict[str, list[Any]] = {
        "OPName": ["linear"] * 2,
        "Latency": [0.5, 0.7],
        "Device": ["Tesla T4"] * 2,
        **common,
    }
    shape = {"B": [1, 1], "M": [58, 60], "N": [13, 14], "K": [141, 150]}
    write_csv(data / "dataset/train/collect/linear/p2.1.0/Tesla T4.csv", {**linear, **shape})
    vector: dict[str, list[Any]] = {
        "OPName": ["mulu", "pow"],
        "Latency": [0.5, 0.7],
        "Device": ["Tesla T4", "Tesla T4"],
        **common,
    }
    write_csv(data / "dataset/test/vec.csv", {**vector, "B": [128, 8], "H": [64, 8]})
    tables = imported("neusight", tmp_path / "NeuSight", tmp_path / "out")
    assert tables["ops"]["dropped"] == {"no_kernel_family": 1}  # pow of two tensors
    found = lab.read(tmp_path / "out", "neusight/ops")
    no_bad_row(found)
    rows = rows_of(found)
    gemm = next(r for r in rows if r["op"] == "gemm" and r["m"] == 58)
    assert (gemm["n"], gemm["k"]) == (141, 13)  # N is the contraction
    assert gemm["latency_us"] == pytest.approx(500) and gemm["gpu"] == "t4" and gemm["dtype"] == "fp32"
    assert gemm["split"] == "train" and gemm["version"] == "2.1.0" and gemm["stack"] == "torch_eager"
    scale = next(r for r in rows if r["op"] == "scale")
    assert (scale["rows"], scale["cols"], scale["split"], scale["kernel_source"]) == (128, 64, "test", "mulu")


def test_pipeweave_import(tmp_path: Path) -> None:
    tables = imported("pipeweave", pipeweave(tmp_path / "pw"), tmp_path / "out")
    assert tables["collectives"]["dropped"] == {"between_nodes": 2}
    rows = rows_of(lab.read(tmp_path / "out", "pipeweave/gemm_fp8"))
    assert sorted((r["gpu"], r["split"], r["latency_us"]) for r in rows) == [
        ("h100_sxm", "test", 11.5),
        ("h20", "test", 40.0),
        ("h20", "train", 40.0),
    ]
    assert {r["dtype"] for r in rows} == {"fp8_block"}
    reduce = next(r for r in rows_of(lab.read(tmp_path / "out", "pipeweave/collectives")) if r["op"] == "all_reduce")
    assert reduce["bytes"] == 2048 and reduce["latency_us"] == pytest.approx(80)  # bytes as they are; the median
    assert reduce["gpu"] == "rtx_pro_6000_server" and reduce["world"] == 2


def test_vidur_import(tmp_path: Path) -> None:
    profiling = tmp_path / "vidur/data/profiling"
    layers = ("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add")
    columns: dict[str, list[Any]] = {f"time_stats.{layer}.median": [0.5, 0.5] for layer in layers}
    columns |= {"n_head": [32, 32], "n_kv_head": [8, 8], "n_embd": [4096, 4096], "n_expanded_embd": [11008, 11008]}
    columns |= {"vocab_size": [32000, 32000], "use_gated_mlp": [True, True]}
    columns |= {"num_tokens": [16, 16], "num_tensor_parallel_workers": [1, 2]}
    write_csv(profiling / "compute/a40/org/model-7b/mlp.csv", columns)
    for fabric, op in (("a100_dgx", "all_reduce"), ("h100_pairwise_nvlink", "send_recv")):
        network: dict[str, list[Any]] = {
            f"time_stats.{op}.median": [0.05, 0.06],
            "num_workers": [2, 2],
            "size": [2048, 4096],
            "devices_per_node": [2, 1],
        }
        write_csv(profiling / "network" / fabric / f"{op}.csv", network)
    tables = imported("vidur", tmp_path / "vidur", tmp_path / "out")
    assert tables["layers"]["dropped"] == {"not_one_kernel": 1, "duplicate": 2}  # emb at tp 2; norm and add, any tp
    assert tables["network"]["dropped"] == {"between_nodes": 2, "copied": 1}
    found = lab.read(tmp_path / "out", "vidur/layers")
    no_bad_row(found)
    rows = {(r["op"], r["kernel_source"], r.get("n", r.get("q_heads"))): r for r in rows_of(found)}
    assert rows["gemm", "attn_pre_proj", 6144]["k"] == 4096  # (32 + 2 * 8) * 128
    assert rows["gemm", "mlp_up_proj", 11008]["latency_us"] == pytest.approx(500)  # gate and up, halved by tp 2
    assert rows["rope", "attn_rope", 16] == {**rows["rope", "attn_rope", 16], "kv_heads": 4, "head_dim": 128}
    assert rows["rmsnorm", "input_layernorm", None]["stack"] == "vllm"
    reduce = rows_of(lab.read(tmp_path / "out", "vidur/network"))[0]
    assert reduce["bytes"] == 2048 and reduce["gpu"] == "a100_sxm"  # the size is in bytes already


# --- any source


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_a_wrong_folder_is_refused_with_what_was_looked_for(source: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(KernelcastError, match=r"empty is no checkout of .*: no .*(csv|parquet)"):
        import_checkout(source, tmp_path / "empty", tmp_path / "out")
    with pytest.raises(KernelcastError, match="no folder"):
        import_checkout(source, tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_half_written(tmp_path: Path) -> None:
    checkout = pipeweave(tmp_path / "pw")
    (checkout / "dataset/gemm_fp8_train.csv").write_text("M,N\n1,2\n")
    (checkout / "dataset/gemm_fp8_test.csv").unlink()
    with pytest.raises(KernelcastError, match="no column K, avg_duration, hardware"):
        import_checkout("pipeweave", checkout, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_import_is_replaced_only_when_asked(tmp_path: Path) -> None:
    checkout = pipeweave(tmp_path / "pw")
    import_checkout("pipeweave", checkout, tmp_path / "out")
    with pytest.raises(KernelcastError, match="exists already"):
        import_checkout("pipeweave", checkout, tmp_path / "out")
    import_checkout("pipeweave", checkout, tmp_path / "out", replace=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["pipeweave"]


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "systems/data/h100_sxm/gemm/vllm/1.0/gemm_perf.parquet"
    file.parent.mkdir(parents=True)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(KernelcastError, match="Git LFS pointer"):
        import_checkout("aiconfigurator", tmp_path, tmp_path / "out")


def test_unknown_source(tmp_path: Path) -> None:
    with pytest.raises(KernelcastError, match=r"unknown source 'vidurr' \(did you mean vidur"):
        import_checkout("vidurr", tmp_path, tmp_path / "out")
