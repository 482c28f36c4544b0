"""Every kernel in Triton, for NVIDIA GPUs; `kernels.py` is the list that `dispatch` resolves."""
