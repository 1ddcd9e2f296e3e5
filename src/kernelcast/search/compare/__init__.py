"""GPUs side by side, each with its best deployment of a model, by cost, latency, throughput or energy."""
