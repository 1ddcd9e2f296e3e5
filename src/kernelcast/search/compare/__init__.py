"""GPUs side by side: every one at its best way to run a model, by cost, latency, throughput or energy."""
