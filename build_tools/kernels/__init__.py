"""Compiles the Triton kernels for GPUs that need not be here, and reports what came out."""
