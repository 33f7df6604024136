"""Dagster assets: one module per stage, each asset a few lines around one call of the engine."""
