# ruff: noqa: F401
"""Every kernel in plain torch: the specification, for any device and dtype including float64. Contract: spec.py."""

from __future__ import annotations

from zbkern.kernels.reference.activation import (
    activation_bwd,
    activation_function,
    activation_fwd,
    gated_bwd,
    gated_fwd,
)
from zbkern.kernels.reference.attention import attention_dgrad, attention_fwd
from zbkern.kernels.reference.embedding import embedding_fwd, embedding_wgrad
from zbkern.kernels.reference.float8 import float8_amax, float8_cast
from zbkern.kernels.reference.grouped import (
    grouped_gated_dgrad,
    grouped_gated_fwd,
    grouped_linear_dgrad,
    grouped_linear_fwd,
    grouped_linear_wgrad,
)
from zbkern.kernels.reference.linear import (
    gated_linear_dgrad,
    gated_linear_fwd,
    linear_dgrad,
    linear_dgrad_sum,
    linear_fwd,
    linear_wgrad,
    linear_wgrads,
)
from zbkern.kernels.reference.loss import (
    cross_entropy_fwd,
    cross_entropy_wgrad,
    log_probs_dgrad,
    log_probs_fwd,
    log_probs_wgrad,
)
from zbkern.kernels.reference.norm import norm_dgrad, norm_fwd, norm_partials, norm_wgrad
from zbkern.kernels.reference.rotary import rotary_dgrad, rotary_fwd, rotated
