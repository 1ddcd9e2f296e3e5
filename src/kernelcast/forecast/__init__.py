"""Limits -> efficiency: how close to its bound a kernel runs, with an interval and a ceiling."""

from kernelcast.forecast.calibration import Calibrated, Calibration, load_calibration
from kernelcast.forecast.conditions import PREDICTORS, learned_from, predictor
from kernelcast.forecast.predictor import Estimate, Predictor, PredictorInput

__all__ = [
    "PREDICTORS", "Calibrated", "Calibration", "Estimate", "Predictor", "PredictorInput", "learned_from",
    "load_calibration", "predictor",
]  # fmt: skip
