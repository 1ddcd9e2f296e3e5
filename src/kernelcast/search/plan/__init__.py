"""Which GPUs, how many, and how a model is cut and served on them: the cheapest service that keeps its goals."""
