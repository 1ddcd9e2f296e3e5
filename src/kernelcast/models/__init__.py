"""Whole models: their architecture, read from Hugging Face's config.json, and a catalogue of well-known ones."""

from kernelcast.models.architecture import Architecture
from kernelcast.models.catalogue import hub_name, model, model_ids
from kernelcast.models.config import SUPPORTED, parse

__all__ = ["SUPPORTED", "Architecture", "hub_name", "model", "model_ids", "parse"]
