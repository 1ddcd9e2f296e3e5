"""The command line: parse, call, show."""

from kernelcast.cli.app import main

__all__ = ["main"]
