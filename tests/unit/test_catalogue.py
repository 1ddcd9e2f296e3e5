"""The GPU catalogue: complete, sourced, and in agreement with what the vendors publish."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kernelcast.hardware.gpu import NUMBERS, RATE_TABLES, Gpu
from kernelcast.hardware.load import CATALOGUE, gpu, gpu_ids, load_gpu

FILES = sorted(CATALOGUE.glob("*.toml"))
IDS = tuple(p.stem for p in FILES if not p.stem.startswith("_"))
BASES = tuple(p.stem for p in FILES if p.stem.startswith("_"))
TOLERANCE = 0.02
NO_TENSOR_CORES = {"p100_pcie", "p100_sxm", "p4", "p40"}

# id: the spellings that users and drivers print; each has to find that GPU
REQUIRED: dict[str, tuple[str, ...]] = {
    "p100_pcie": ("p100", "Tesla P100-PCIE-16GB"),
    "p100_sxm": ("Tesla P100-SXM2-16GB",),
    "p4": ("Tesla P4",),
    "v100_pcie": ("Tesla V100-PCIE-32GB",),
    "v100_sxm": ("v100", "Tesla V100-SXM2-32GB"),
    "t4": ("Tesla T4",),
    "a2": ("NVIDIA A2",),
    "a10": ("NVIDIA A10",),
    "a10g": ("NVIDIA A10G",),
    "a30": ("NVIDIA A30",),
    "a40": ("NVIDIA A40",),
    "rtx_a6000": ("NVIDIA RTX A6000", "RTXA6000"),
    "rtx_3090": ("NVIDIA GeForce RTX 3090",),
    "a100_pcie_40gb": ("NVIDIA A100-PCIE-40GB",),
    "a100_pcie": ("NVIDIA A100 80GB PCIe",),
    "a100_sxm_40gb": ("NVIDIA A100-SXM4-40GB",),
    "a100_sxm": ("a100", "a100_sxm_80gb", "NVIDIA A100-SXM4-80GB"),
    "a800_sxm": ("a800", "NVIDIA A800-SXM4-80GB"),
    "a800_pcie": ("NVIDIA A800 80GB PCIe",),
    "l4": ("NVIDIA L4",),
    "l20": ("NVIDIA L20",),
    "l40": ("NVIDIA L40",),
    "l40s": ("NVIDIA L40S",),
    "rtx_4090": ("NVIDIA GeForce RTX 4090",),
    "rtx_6000_ada": ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
    "h20": ("NVIDIA H20",),
    "h100_sxm": ("h100", "NVIDIA H100", "NVIDIA H100 80GB HBM3"),
    "h100_pcie": ("NVIDIA H100 PCIe",),
    "h100_nvl": ("NVIDIA H100 NVL",),
    "h800_sxm": ("h800", "NVIDIA H800"),
    "h200_sxm": ("h200", "NVIDIA H200"),
    "h200_nvl": ("NVIDIA H200 NVL",),
    "gh200": ("NVIDIA GH200 480GB",),
    "b200_sxm": ("b200", "NVIDIA B200"),
    "b300_sxm": ("b300", "NVIDIA B300 SXM6 AC"),
    "gb200": ("NVIDIA GB200",),
    "gb300": ("NVIDIA GB300",),
    "rtx_pro_6000_server": ("rtx_pro_6000", "RTXPRO6000S", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    "rtx_pro_6000_workstation": ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
    "rtx_5090": ("NVIDIA GeForce RTX 5090",),
    "rtx_5080": ("NVIDIA GeForce RTX 5080",),
    "v100_sxm_16gb": ("Tesla V100-SXM2-16GB",),
    "v100_pcie_16gb": ("Tesla V100-PCIE-16GB",),
    "p40": ("Tesla P40",),
    "rtx_2080_ti": ("NVIDIA GeForce RTX 2080 Ti",),
    "rtx_3060": ("NVIDIA GeForce RTX 3060",),
    "rtx_4070_ti_super": ("NVIDIA GeForce RTX 4070 Ti SUPER",),
    "rtx_5060_ti_16gb": ("NVIDIA GeForce RTX 5060 Ti",),
    "gb10": ("NVIDIA GB10",),
    "b100_sxm": ("NVIDIA B100",),
    "mi300a": ("AMD Instinct MI300A",),
    "mi308x": ("AMD Instinct MI308X",),
    "mi350x": ("AMD Instinct MI350X",),
    "mi100": ("AMD Instinct MI100",),
    "mi210": ("AMD Instinct MI210",),
    "mi250": ("AMD Instinct MI250",),
    "mi250x": ("AMD Instinct MI250X",),
    "mi300x": ("AMD Instinct MI300X",),
    "mi325x": ("AMD Instinct MI325X",),
    "mi355x": ("AMD Instinct MI355X",),
}

# field: lowest and highest value that a GPU of these generations can have, in SI units
RANGES: dict[str, tuple[float, float]] = {
    "sm_count": (8, 400),
    "clock_base_hz": (5e8, 4e9),
    "clock_boost_hz": (5e8, 4e9),
    "clock_max_hz": (5e8, 4e9),
    "clock_tensor_hz": (5e8, 4e9),
    "clock_sustained_hz": (5e8, 4e9),
    "xu_ops_per_clk_sm": (4, 64),
    "issue_warps_per_clk_sm": (1, 8),
    "warp_threads": (32, 64),
    "registers_per_sm": (32768, 262144),
    "max_threads_per_sm": (1024, 2560),
    "max_ctas_per_sm": (8, 40),
    "smem_bytes_per_sm": (48 * 1024, 256 * 1024),
    "smem_bytes_per_cta": (48 * 1024, 256 * 1024),
    "smem_bytes_per_clk_sm": (64, 256),
    "l2_bytes": (1 << 20, 512 << 20),
    "l2_bytes_per_clk": (256, 32768),
    "l2_bytes_per_clk_sm": (32, 128),
    "l2_partitions": (1, 2),
    "dram_bytes": (8 << 30, 512 << 30),
    "dram_bytes_per_s": (1e11, 2e13),
    "link_bytes_per_s": (0, 2e12),
    "pcie_bytes_per_s": (8e9, 256e9),
    "sustained_tensor_fraction": (0.5, 1),
    "long_tensor_fraction": (0.3, 1),
    "tensor_flops_per_j": (1e10, 1e13),
    "sustained_flops_per_j": (1e10, 1e13),
    "sustained_dram_fraction": (0.5, 1),
    "launch_floor_s": (5e-7, 1e-5),
    "sustained_launch_s": (1e-6, 1e-5),
    "power_w": (40, 2000),
    "devices_per_package": (1, 2),
    "link_gpus": (1, 72),
    "price_usd": (100, 1e5),
}
LINK_KINDS = {
    *(f"nvlink{generation}" for generation in range(1, 6)),
    *(f"xgmi{generation}" for generation in range(2, 5)),
    *(f"pcie{generation}" for generation in range(3, 6)),
    *(f"pcie{generation}_shared" for generation in range(4, 6)),
}
RATE_DTYPES = {"fp16", "bf16", "tf32", "fp8", "int8", "int4", "nvfp4", "mxfp4", "fp32", "fp64"}


@functools.cache
def loaded(gpu_id: str) -> Gpu:
    return load_gpu(CATALOGUE / f"{gpu_id}.toml")


def raw(stem: str) -> dict[str, Any]:
    return tomllib.loads((CATALOGUE / f"{stem}.toml").read_text(encoding="utf-8"))


def folded(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(w for w in words if w not in ("nvidia", "tesla", "amd", "instinct", "geforce"))


def test_the_catalogue_lists_the_gpus_that_were_promised() -> None:
    assert set(gpu_ids()) == set(IDS)
    assert len(IDS) >= 40
    assert set(REQUIRED) <= set(IDS)


@pytest.mark.parametrize("gpu_id", REQUIRED)
def test_every_promised_spelling_finds_its_gpu(gpu_id: str) -> None:
    assert loaded(gpu_id).name in REQUIRED[gpu_id]
    for spelling in (gpu_id, gpu_id.upper(), *REQUIRED[gpu_id]):
        assert gpu(spelling).id == gpu_id


def test_no_spelling_belongs_to_two_gpus() -> None:
    owners: dict[str, set[str]] = {}
    for gpu_id in IDS:
        found = loaded(gpu_id)
        for spelling in (gpu_id, found.name, *found.aliases):
            assert folded(spelling), f"{gpu_id}: {spelling!r} folds to nothing"
            owners.setdefault(folded(spelling), set()).add(gpu_id)
    assert {name: ids for name, ids in owners.items() if len(ids) > 1} == {}


@pytest.mark.parametrize("gpu_id", IDS)
def test_every_alias_finds_its_gpu(gpu_id: str) -> None:
    for alias in loaded(gpu_id).aliases:
        assert gpu(alias).id == gpu_id


@pytest.mark.parametrize("gpu_id", IDS)
def test_every_number_has_a_source(gpu_id: str) -> None:
    found = loaded(gpu_id)
    defaults = {f.name: f.default for f in dataclasses.fields(Gpu)}
    names = [n for n in NUMBERS if getattr(found, n) != defaults[n]]
    for table in (*RATE_TABLES, "published_flops_per_s"):
        names += [f"{table}.{dtype}" for dtype in getattr(found, table)]
    for name in names:
        source = found.sources.get(name, "")
        assert len(source.strip()) > 10, f"{gpu_id}: {name} has no source"
        assert "no source given" not in source, f"{gpu_id}: {name} has no source"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_files_use_every_source_that_they_spell_out(path: Path) -> None:
    data = raw(path.stem)
    used: set[str] = set()
    for entry in data.values():
        for number in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(number, list) and len(number) == 2 and not isinstance(number[0], str):
                used.add(number[1])
    assert used == set(data["sources"])


@pytest.mark.parametrize("gpu_id", IDS)
def test_derived_peaks_agree_with_the_published_ones(gpu_id: str) -> None:
    found = loaded(gpu_id)
    for key, published in found.published_flops_per_s.items():
        dtype = key.removesuffix("_vector")
        tensor = found.tensor_flops_per_s(dtype) if key == dtype else 0.0
        peak = tensor or found.fma_flops_per_s(dtype)
        expected = published / found.devices_per_package
        message = f"{gpu_id}: {key} {peak:.4g}, published {expected:.4g}"
        assert peak == pytest.approx(expected, rel=TOLERANCE), message


@pytest.mark.parametrize("gpu_id", IDS)
def test_peaks_that_have_to_be_published(gpu_id: str) -> None:
    found = loaded(gpu_id)
    published = found.published_flops_per_s
    assert "fp32" in published or "fp32_vector" in published
    if "fp32" in found.tensor_flops_per_clk_sm:  # matrix cores have their own fp32 peak
        assert {"fp32", "fp32_vector"} <= set(published)
    assert bool(found.tensor_flops_per_clk_sm) == (gpu_id not in NO_TENSOR_CORES)
    if found.tensor_flops_per_clk_sm:
        assert "fp16" in found.tensor_flops_per_clk_sm
        assert "fp16" in published


@pytest.mark.parametrize("gpu_id", IDS)
def test_numbers_are_in_si_units(gpu_id: str) -> None:
    found = loaded(gpu_id)
    assert set(RANGES) >= set(NUMBERS)
    for name in NUMBERS:
        value = getattr(found, name)
        if value is not None:
            low, high = RANGES[name]
            assert low <= value <= high, f"{gpu_id}: {name} = {value}"
    assert found.clock_base_hz <= found.clock_boost_hz
    assert found.clock_tensor_hz is None or found.clock_tensor_hz <= found.clock_boost_hz
    assert found.l2_bytes_per_s > found.dram_bytes_per_s
    assert found.vendor in ("nvidia", "amd")


@pytest.mark.parametrize("gpu_id", IDS)
def test_whole_numbers_are_integers(gpu_id: str) -> None:
    found = loaded(gpu_id)
    for spec in dataclasses.fields(Gpu):
        if spec.type == "int":
            assert type(getattr(found, spec.name)) is int, f"{gpu_id}: {spec.name}"


@pytest.mark.parametrize("gpu_id", IDS)
def test_links(gpu_id: str) -> None:
    found = loaded(gpu_id)
    assert found.link_kind in LINK_KINDS
    assert (found.link_bytes_per_s == 0) == found.link_kind.startswith("pcie")
    if "GeForce" in found.name and not found.link_bytes_per_s:  # no peer access: by way of the host's memory
        assert found.link_kind.endswith("_shared")


@pytest.mark.parametrize("gpu_id", IDS)
def test_dtypes_are_those_that_the_hardware_has(gpu_id: str) -> None:
    found = loaded(gpu_id)
    tensor = set(found.tensor_flops_per_clk_sm)
    assert tensor <= RATE_DTYPES
    assert set(found.fma_flops_per_clk_sm) <= RATE_DTYPES
    assert {"fp32", "fp16", "fp64"} <= set(found.fma_flops_per_clk_sm)
    if found.vendor == "nvidia":
        capability = float(found.compute_capability)
        assert ("bf16" in tensor) == ("tf32" in tensor) == (capability >= 8.0)
        assert ("fp8" in tensor) == (capability >= 8.9)
        assert ("nvfp4" in tensor) == (capability >= 10.0)
        assert ("int4" in tensor) == (7.5 <= capability < 9.0)
        assert ("fp64" in tensor) == (found.compute_capability in ("8.0", "9.0", "10.0", "10.3"))
        assert ("mxfp4" in tensor) == ("nvfp4" in tensor)
        assert "fp32" not in tensor
    else:
        assert ("mxfp4" in tensor) == (found.architecture == "cdna4")
        assert ("fp8" in tensor) == (found.architecture in ("cdna3", "cdna4"))
        assert not tensor & {"nvfp4", "int4"}
        assert found.warp_threads == 64


def test_export_variants_differ_where_they_really_differ() -> None:
    h100, h800 = loaded("h100_sxm"), loaded("h800_sxm")
    assert (h100.link_bytes_per_s, h800.link_bytes_per_s) == (450e9, 200e9)
    assert h800.fma_flops_per_s("fp64") == pytest.approx(1e12, rel=TOLERANCE)
    assert h100.fma_flops_per_s("fp64") > 30 * h800.fma_flops_per_s("fp64")
    assert h100.tensor_flops_per_s("bf16") == h800.tensor_flops_per_s("bf16")
    assert h100.dram_bytes_per_s == h800.dram_bytes_per_s
    for a100_id, a800_id in (("a100_sxm", "a800_sxm"), ("a100_pcie", "a800_pcie")):
        a100, a800 = loaded(a100_id), loaded(a800_id)
        assert (a100.link_bytes_per_s, a800.link_bytes_per_s) == (300e9, 200e9)
        assert a100.tensor_flops_per_s("bf16") == a800.tensor_flops_per_s("bf16")


def test_cards_of_one_chip_differ_in_tensor_rate() -> None:
    l40, l40s = loaded("l40"), loaded("l40s")
    assert l40.sm_count == l40s.sm_count
    assert 2 * l40.tensor_flops_per_clk_sm["bf16"] == l40s.tensor_flops_per_clk_sm["bf16"]
    for geforce, professional in (("rtx_4090", "rtx_6000_ada"), ("rtx_5090", "rtx_pro_6000_workstation")):
        half, full = loaded(geforce), loaded(professional)
        assert 2 * half.tensor_flops_per_clk_sm["bf16"] == full.tensor_flops_per_clk_sm["bf16"]


def test_pascal_cards_multiply_fp16_in_fp32() -> None:
    """Their half2 instructions run at 1/64 of the rate, and no library uses them for products."""
    for gpu_id in ("p4", "p40"):
        found = loaded(gpu_id)
        assert found.fma_flops_per_s("fp16") == found.fma_flops_per_s("fp32")


def test_packages_of_two_devices() -> None:
    assert [i for i in IDS if loaded(i).devices_per_package == 2] == ["mi250", "mi250x"]


def test_every_base_is_used() -> None:
    parents: dict[str, str] = {stem: raw(stem).get("base", "") for stem in (*IDS, *BASES)}
    reached: set[str] = set()
    for gpu_id in IDS:
        stem = gpu_id
        while stem := parents[stem]:
            reached.add(stem)
    assert set(BASES) <= reached
