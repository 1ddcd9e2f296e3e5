"""Whole models: their architecture, read from Hugging Face's config.json, and a catalogue of well-known ones."""

from kernelcast.networks.architecture import Architecture, Parameters, Quantization
from kernelcast.networks.catalogue import model, model_ids
from kernelcast.networks.config import SUPPORTED, parse
from kernelcast.networks.layers import Attention, Dense, Experts, Layer, LayerRun, LinearAttention, Mla, Norms

__all__ = [
    "SUPPORTED",
    "Architecture",
    "Attention",
    "Dense",
    "Experts",
    "Layer",
    "LayerRun",
    "LinearAttention",
    "Mla",
    "Norms",
    "Parameters",
    "Quantization",
    "model",
    "model_ids",
    "parse",
]
