"""Weights that several ranks hold: data parallelism and tied weights."""
