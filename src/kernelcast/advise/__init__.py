"""What to do with measured and predicted kernels: where time is lost, and what to try."""
