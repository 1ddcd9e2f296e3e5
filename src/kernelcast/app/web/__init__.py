"""The web page and its API: read, ask in a worker process, answer. `kernelcast web` starts it."""
