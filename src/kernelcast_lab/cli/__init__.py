"""The lab's commands, which join the program's when kernelcast-lab is installed."""
