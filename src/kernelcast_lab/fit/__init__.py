"""Fit the learned efficiency: measured calls -> features -> networks -> weights that ship with the package."""
