"""Modules replaced by ones whose W can wait, and the functions of modules that zbkern does not know."""
