"""How accurate the predictors are: splits that leave shapes, GPUs, generations or stacks out, and honest tables."""
