"""Autograd functions: forward saves; backward computes the input gradient and defers the weight gradient, W."""
