"""Limits -> efficiency: how close to its bound a kernel runs, with an interval and a ceiling."""

from kernelcast.efficiency.calibration import Calibrated, Calibration, load_calibration
from kernelcast.efficiency.choose import PREDICTORS, predictor
from kernelcast.efficiency.predictor import Estimate, Predictor, Question

__all__ = [
    "PREDICTORS", "Calibrated", "Calibration", "Estimate", "Predictor", "Question", "load_calibration", "predictor",
]  # fmt: skip
