"""Models as they are served: one static batch from prompt to last token, and the memory that it needs."""
