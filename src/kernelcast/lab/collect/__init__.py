"""Measure on a GPU: kernels, and whole models."""
