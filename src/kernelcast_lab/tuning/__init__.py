"""Sweeps of Triton configs that `kernelcast tune` is fitted and scored on."""
