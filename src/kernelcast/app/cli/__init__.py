"""The command line: parse, call, show."""

from kernelcast.app.cli.app import main

__all__ = ["main"]
