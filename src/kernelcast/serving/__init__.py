"""A served model under load: requests over time, schedulers, KV cache, engines, and benchmarks of real servers."""
