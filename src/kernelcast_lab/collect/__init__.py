"""Whole models measured on a CUDA GPU: steps with every kernel and its ATen op."""
