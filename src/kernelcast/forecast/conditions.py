"""The conditions under which calls are predicted: L2 state, limits left out, the predictor by name, a calibration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernelcast import plugins
from kernelcast.errors import KernelcastError, unknown, warn
from kernelcast.forecast.calibration import UNSCALED, Calibrated, Calibration, Scale, host_key, load_calibration
from kernelcast.forecast.learned import Learned, load
from kernelcast.forecast.predictor import Generic, Predictor
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import PIPELINES
from kernelcast.machine.limits import Rotation

BASELINES = ("roofline", "pipeweave", "neusight")  # kernelcast-lab has them


def _baseline(name: str) -> Predictor:
    made: Predictor = plugins.plugin(plugins.PREDICTORS, name)()
    return made


PREDICTORS: Mapping[str, Callable[[], Predictor]] = {
    "learned": Learned,
    "generic": Generic,
    **{name: functools.partial(_baseline, name) for name in BASELINES},
}


@functools.cache
def predictor(name: str) -> Predictor:
    """The predictor called ``name``: learned (the default), generic, or a baseline."""
    if name not in PREDICTORS:
        raise unknown("predictor", name, PREDICTORS)
    return PREDICTORS[name]()


def learned_from(folder: Path) -> Learned:
    """The learned efficiency with the weights of a folder, as `kernelcast fit` writes them; others are refused."""
    from safetensors import SafetensorError

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise KernelcastError(f"no weights in {folder}: no FAMILY.safetensors, as `kernelcast fit -o DIR` writes")
    for path in files:
        try:
            load(folder, path.stem)
        except (SafetensorError, KeyError, TypeError) as error:
            raise KernelcastError(f"{path} holds no weights of kernelcast fit ({error})") from None
    return Learned(folder)


@dataclass(frozen=True)
class Conditions:
    """What holds around a call.

    ``rotation``: how many sets of this call's weights pass between two uses of one; infinity (the default) is a
    model with many layers, 1 the same call again and again with whatever L2 kept. ``input_rotation``: the same of its
    activations, which the kernel before has just made (1) unless a benchmark takes others each time. ``without`` leaves
    limits out, which only physics can answer. ``predictor``: learned, generic, or a baseline. ``calibration``:
    measurements of the target GPU, as a file of `kernelcast calibrate` or loaded.
    """

    rotation: float = np.inf
    input_rotation: float = 1.0
    without: tuple[str, ...] = ()
    predictor: str | Predictor = "learned"
    calibration: Calibration | Path | str | None = None

    def __post_init__(self) -> None:
        for name in ("rotation", "input_rotation"):
            if not getattr(self, name) >= 1:
                raise KernelcastError(f"{name} must be 1 or more, not {getattr(self, name)!r}")
        for name in self.without:
            if name not in PIPELINES:
                raise unknown("limit", name, PIPELINES)
        if set(self.without) >= set(PIPELINES):
            raise KernelcastError("every limit is left out; keep at least one")
        if self.without and self.predictor == "learned":
            object.__setattr__(self, "predictor", "generic")
        base = self._base  # refuses an unknown name
        if self.calibration is None:
            return
        if self.without:
            raise KernelcastError("with a limit left out the forecast is analytical, and no calibration applies")
        if isinstance(self.calibration, str | Path):
            object.__setattr__(self, "calibration", load_calibration(self.calibration))
        assert isinstance(self.calibration, Calibration)
        caveat = self.calibration.caveat(base.name)
        if caveat:
            warn(caveat)

    @property
    def rotations(self) -> Rotation:
        return Rotation(self.rotation, self.input_rotation)

    @property
    def _base(self) -> Predictor:
        return predictor(self.predictor) if isinstance(self.predictor, str) else self.predictor

    @property
    def loaded_calibration(self) -> Calibration | None:
        """The calibration, which is loaded when the conditions are made."""
        return self.calibration if isinstance(self.calibration, Calibration) else None

    @property
    def loaded_predictor(self) -> Predictor:
        """The predictor with its calibration."""
        calibration = self.loaded_calibration
        return self._base if calibration is None else Calibrated(self._base, calibration)

    @property
    def runs_measured(self) -> bool:
        """Whether the calibration has measured runs, so that nothing of the whole is in doubt."""
        calibration = self.loaded_calibration
        return calibration is not None and bool(calibration.scales)

    def host_scale(self, name: str) -> Scale:
        """What measured runs say of a host, by the name of its file or of its stack."""
        calibration = self.loaded_calibration
        return UNSCALED if calibration is None else calibration.scales.get(host_key(name), UNSCALED)

    def check_gpu(self, gpu: Gpu) -> None:
        """Refuse a calibration of another GPU before any work."""
        if self.loaded_calibration is not None:
            self.loaded_calibration.check_gpu(gpu.known_as)


DEFAULT = Conditions()
