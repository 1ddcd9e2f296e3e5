"""Which GPUs, how many, and how a model is sharded and served on them: the cheapest service that meets its goals."""
