"""The instruction path of a GPU: which instruction multiplies its matrices. Kernels are written for it, so that what is
known of one capability holds for another of the same path.

NVIDIA numbers capabilities by chip, not by path: 12.0 (GeForce and RTX PRO) has the mma.sync of 8.9, not the tcgen05 of
10.0 (PTX ISA, sections on wgmma and tcgen05: wgmma is for sm_90a alone, tcgen05 for sm_100, sm_103 and sm_110).
"""

from __future__ import annotations

from kernelcast.errors import KernelcastError

FMA, MMA_SYNC, WGMMA, TCGEN05, MFMA = PATHS = ("fma", "mma.sync", "wgmma", "tcgen05", "mfma")
WIDE = (WGMMA, TCGEN05)  # operands from shared memory, many rows an instruction
_KNOWN = {
    **dict.fromkeys(("5.0", "5.2", "5.3", "6.0", "6.1", "6.2"), FMA),
    **dict.fromkeys(("7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "12.0", "12.1"), MMA_SYNC),
    "9.0": WGMMA,
    **dict.fromkeys(("10.0", "10.3", "11.0"), TCGEN05),
    **dict.fromkeys(("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"), MFMA),
}
_DERIVED = ("follows from compute capability", "inherited")
_ISA = "PTX ISA: wgmma sm_90a; tcgen05 sm_100, sm_103, sm_110; AMD CDNA ISA: MFMA"


def path_of(capability: str) -> tuple[str, str]:
    """The path of a compute capability, and where that is from; see ``inherited`` for one that nobody knows."""
    if not isinstance(capability, str):
        raise KernelcastError(f'compute_capability must be in quotes, as "9.0" or "gfx942", not {capability!r}')
    if capability in _KNOWN:
        return _KNOWN[capability], f"{_DERIVED[0]} {capability} ({_ISA})"
    path, rule = inherited(capability)
    return path, f"{_DERIVED[1]}: compute capability {capability} is not known; {rule}"


def is_of_another(source: str, capability: str) -> bool:
    """Whether a path followed from a compute capability that is no longer the GPU's."""
    return source.startswith(_DERIVED) and f"compute capability {capability} " not in source


def inherited(capability: str) -> tuple[str, str]:
    """The path of an unknown capability: that of its generation, and of a later one that of the data-centre line, which
    has kept its instruction since 10.0. A GPU file that knows better says ``instruction_path``."""
    if capability.startswith("gfx"):
        return MFMA, "AMD's data-centre GPUs have MFMA"
    digits = capability.partition(".")[0]
    if not digits.isdigit():
        raise KernelcastError(
            f"compute_capability must be as 9.0 or gfx942, not {capability!r}; or say instruction_path = "
            f'"…": {", ".join(PATHS)}'
        )
    major = int(digits)
    if major < 7:
        return FMA, "below 7.0 no GPU has matrix units"
    if major < 9:
        return MMA_SYNC, "7.x and 8.x have mma.sync"
    if major == 9:
        return WGMMA, "9.x has wgmma"
    if major == 12:
        return MMA_SYNC, "12.x has mma.sync, as 8.9"
    return TCGEN05, "10.x, 11.x and what comes after 12.x are taken for data-centre GPUs, with tcgen05"
