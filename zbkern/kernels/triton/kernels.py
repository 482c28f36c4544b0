# ruff: noqa: F401
"""All Triton kernels as one module: what `dispatch` resolves impl="triton" to."""

from __future__ import annotations

from zbkern.kernels.triton.activation import activation_bwd, activation_fwd, gated_bwd, gated_fwd
from zbkern.kernels.triton.attention_backward import attention_dgrad
from zbkern.kernels.triton.attention_forward import attention_fwd
from zbkern.kernels.triton.embedding import embedding_fwd, embedding_wgrad
from zbkern.kernels.triton.float8 import float8_amax, float8_cast
from zbkern.kernels.triton.gated import (
    gated_linear_dgrad,
    gated_linear_fwd,
    grouped_gated_dgrad,
    grouped_gated_fwd,
)
from zbkern.kernels.triton.grouped import grouped_linear_dgrad, grouped_linear_fwd
from zbkern.kernels.triton.grouped_wgrad import grouped_linear_wgrad
from zbkern.kernels.triton.linear import linear_dgrad, linear_fwd
from zbkern.kernels.triton.loss import cross_entropy_fwd, cross_entropy_wgrad
from zbkern.kernels.triton.norm_backward import norm_dgrad, norm_partials, norm_wgrad
from zbkern.kernels.triton.norm_forward import norm_fwd
from zbkern.kernels.triton.rotary import rotary_dgrad, rotary_fwd
from zbkern.kernels.triton.wgrad import linear_dgrad_sum, linear_wgrad, linear_wgrads
