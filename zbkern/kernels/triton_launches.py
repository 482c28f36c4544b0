"""The launches that run as Triton kernels, as one module: what `dispatch` resolves impl="triton" to."""

from __future__ import annotations

from zbkern.kernels.triton_activation import activation_bwd as activation_bwd
from zbkern.kernels.triton_activation import activation_fwd as activation_fwd
from zbkern.kernels.triton_activation import gated_bwd as gated_bwd
from zbkern.kernels.triton_activation import gated_fwd as gated_fwd
