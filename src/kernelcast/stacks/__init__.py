"""The software that runs kernels, as data: engines that serve a model, and libraries that are called by themselves."""

from kernelcast.stacks.stack import Library, Stack, runner, stack, stack_ids

__all__ = ["Library", "Stack", "runner", "stack", "stack_ids"]
