"""Training steps of traced models: on one GPU (step.py), and on many (scale.py)."""
