"""The compiled extension's kernels: thin calls into `zbkern._cuda`."""
