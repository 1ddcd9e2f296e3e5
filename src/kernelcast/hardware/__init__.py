"""GPUs and the links between them: frozen values from a catalogue of TOML files."""

from kernelcast.hardware.fabric import Fabric, fabric, fabrics
from kernelcast.hardware.gpu import Gpu
from kernelcast.hardware.load import gpu, gpu_ids, load_gpu, origin_of

__all__ = ["Fabric", "Gpu", "fabric", "fabrics", "gpu", "gpu_ids", "load_gpu", "origin_of"]
