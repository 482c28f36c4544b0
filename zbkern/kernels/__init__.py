"""Kernels: their contract (`spec`), the same in plain torch (`reference`), and which backend runs what (`dispatch`)."""
