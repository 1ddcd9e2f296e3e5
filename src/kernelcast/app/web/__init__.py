"""The web page and its API: parse, forecast in a worker process, respond. `kernelcast web` starts it."""
