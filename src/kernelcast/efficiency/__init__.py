"""Limits -> efficiency: how close to its bound a kernel runs, with an interval and a ceiling."""

from kernelcast.efficiency.choose import PREDICTORS, predictor
from kernelcast.efficiency.predictor import Estimate, Predictor, Question

__all__ = ["PREDICTORS", "Estimate", "Predictor", "Question", "predictor"]
