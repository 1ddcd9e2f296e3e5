"""GPUs and the links between them: frozen values from a catalogue of TOML files."""

from kernelcast.hardware.fabric import Fabric, fabric, fabrics, kind_of
from kernelcast.hardware.gpu import Gpu
from kernelcast.hardware.load import gpu, gpu_ids, load_gpu, origin_of, parse_gpu, root_of
from kernelcast.hardware.what_if import changed

__all__ = [
    "Fabric",
    "Gpu",
    "changed",
    "fabric",
    "fabrics",
    "gpu",
    "gpu_ids",
    "kind_of",
    "load_gpu",
    "origin_of",
    "parse_gpu",
    "root_of",
]
