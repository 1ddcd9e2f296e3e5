"""Many deployments at once: compare, plan, sweep."""
