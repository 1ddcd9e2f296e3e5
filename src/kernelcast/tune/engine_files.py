"""Config files as serving engines look them up: one a (experts, width of an expert, device), token counts as keys.

vLLM reads ``$VLLM_TUNED_CONFIG_FOLDER/NAME``; SGLang reads ``$SGLANG_MOE_CONFIG_DIR/configs/triton_X_Y_Z/NAME``. At run
time both take the entry whose token count is nearest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kernelcast.errors import KernelcastError, unknown
from kernelcast.files import complete
from kernelcast.hardware import Gpu
from kernelcast.tune.configs import Config, MoeProblem

STACKS = ("vllm", "sglang")
# Of kernelcast's formats: what the engines' file names say. 16-bit formats share the file without a dtype.
_DTYPES = {"bf16": "", "fp16": "", "fp8": ",dtype=fp8_w8a8", "fp8_block": ",dtype=fp8_w8a8"}
_BLOCK_SHAPE = {"vllm": ",block_shape=[128,128]", "sglang": ",block_shape=[128, 128]"}  # a space in SGLang's


def file_name(stack: str, experts: int, inter: int, device: str, dtype: str = "bf16") -> str:
    """``device``: as the driver prints it. ``inter``: columns of the second weights on one GPU."""
    if stack not in STACKS:
        raise unknown("stack", stack, STACKS)
    if dtype not in _DTYPES:
        raise KernelcastError(f"no config file for dtype {dtype}: engines have them for {', '.join(_DTYPES)}")
    name = device.replace(" ", "_")
    if stack == "vllm" and "H200" in name.split("_"):
        name = "NVIDIA_H200"  # vLLM uses one file for the whole family
    shape = _BLOCK_SHAPE[stack] if dtype == "fp8_block" else ""
    return f"E={experts},N={inter},device_name={name}{_DTYPES[dtype]}{shape}.json"


def write_config_file(
    folder: Path, stack: str, chip: Gpu, found: Mapping[MoeProblem, Config], triton: str, device: str | None = None
) -> Path:
    """One file with an entry for each problem's tokens; problems differ in nothing else.

    Entries of other token counts that the file has already stay in it.
    """
    first, *others = found
    if any((p.experts, p.inter, p.dtype) != (first.experts, first.inter, first.dtype) for p in others):
        raise KernelcastError("one file holds one layer: experts, width and dtype are the same for all tokens")
    name = file_name(stack, first.experts, first.inter, device or chip.name, first.dtype)
    place = folder if stack == "vllm" else folder / "configs" / f"triton_{triton.replace('.', '_')}"
    path = place / name
    entries = _entries(path) | {p.tokens: found[p].named for p in found}
    place.mkdir(parents=True, exist_ok=True)
    with complete(path) as part:
        part.write_text(json.dumps({str(tokens): entries[tokens] for tokens in sorted(entries)}, indent=4) + "\n")
    return path


def _entries(path: Path) -> dict[int, dict[str, int]]:
    """What a file holds, by tokens. Other keys (vLLM adds the version of Triton) go: they may no longer be true."""
    if not path.exists():
        return {}
    try:
        return {int(key): entry for key, entry in json.loads(path.read_text(encoding="utf-8")).items() if key.isdigit()}
    except (ValueError, AttributeError):
        raise KernelcastError(
            f"{path} is there and is no config file; move it away, or write to another folder"
        ) from None
