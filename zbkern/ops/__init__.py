"""Ops with separate B and W: their checks, autograd functions, and what stands for them inside torch.compile."""
