"""GPUs and the links between them: frozen values from a catalogue of TOML files."""

from kernelcast.hardware.fabric import Fabric, fabric, fabric_type, fabrics
from kernelcast.hardware.gpu import Gpu
from kernelcast.hardware.load import changed, gpu, gpu_ids, load_gpu, origin_of, parse_gpu, root_of, unknown_gpu

__all__ = [
    "Fabric",
    "Gpu",
    "changed",
    "fabric",
    "fabric_type",
    "fabrics",
    "gpu",
    "gpu_ids",
    "load_gpu",
    "origin_of",
    "parse_gpu",
    "root_of",
    "unknown_gpu",
]
