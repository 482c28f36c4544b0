"""Autograd functions: forward saves; backward runs the input gradient now and hands the weight gradient on as a W."""
