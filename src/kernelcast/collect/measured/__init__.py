"""Measured calls: one schema of a table, its Parquet files, and which shapes a fit may see."""
