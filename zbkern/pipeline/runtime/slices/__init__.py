"""Sequences in slices: how a batch is cut, and what slices leave to each other."""
