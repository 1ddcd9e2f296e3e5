"""Kernel calls: what is asked. One value that tables, models, traces and profiles speak in, and tables of them."""

from kernelcast.forecast.call import Call, Launch

__all__ = ["Call", "Launch"]
