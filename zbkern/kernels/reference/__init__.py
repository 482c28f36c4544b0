"""Every kernel in plain torch: the specification, for any device and dtype including float64. Contract: spec.py."""

from __future__ import annotations

from zbkern.kernels.reference.activation import activation_bwd as activation_bwd
from zbkern.kernels.reference.activation import activation_function as activation_function
from zbkern.kernels.reference.activation import activation_fwd as activation_fwd
from zbkern.kernels.reference.activation import gated_bwd as gated_bwd
from zbkern.kernels.reference.activation import gated_fwd as gated_fwd
from zbkern.kernels.reference.attention import attention_dgrad as attention_dgrad
from zbkern.kernels.reference.attention import attention_fwd as attention_fwd
from zbkern.kernels.reference.embedding import embedding_fwd as embedding_fwd
from zbkern.kernels.reference.embedding import embedding_wgrad as embedding_wgrad
from zbkern.kernels.reference.fp8 import fp8_linear_dgrad as fp8_linear_dgrad
from zbkern.kernels.reference.fp8 import fp8_linear_fwd as fp8_linear_fwd
from zbkern.kernels.reference.grouped import grouped_gated_dgrad as grouped_gated_dgrad
from zbkern.kernels.reference.grouped import grouped_gated_fwd as grouped_gated_fwd
from zbkern.kernels.reference.grouped import grouped_linear_dgrad as grouped_linear_dgrad
from zbkern.kernels.reference.grouped import grouped_linear_fwd as grouped_linear_fwd
from zbkern.kernels.reference.grouped import grouped_linear_wgrad as grouped_linear_wgrad
from zbkern.kernels.reference.linear import gated_linear_dgrad as gated_linear_dgrad
from zbkern.kernels.reference.linear import gated_linear_fwd as gated_linear_fwd
from zbkern.kernels.reference.linear import linear_dgrad as linear_dgrad
from zbkern.kernels.reference.linear import linear_dgrad_sum as linear_dgrad_sum
from zbkern.kernels.reference.linear import linear_fwd as linear_fwd
from zbkern.kernels.reference.linear import linear_wgrad as linear_wgrad
from zbkern.kernels.reference.linear import linear_wgrads as linear_wgrads
from zbkern.kernels.reference.loss import cross_entropy_fwd as cross_entropy_fwd
from zbkern.kernels.reference.loss import cross_entropy_wgrad as cross_entropy_wgrad
from zbkern.kernels.reference.norm import layer_norm_dgrad as layer_norm_dgrad
from zbkern.kernels.reference.norm import layer_norm_fwd as layer_norm_fwd
from zbkern.kernels.reference.norm import norm_partials as norm_partials
from zbkern.kernels.reference.norm import norm_wgrad as norm_wgrad
from zbkern.kernels.reference.norm import rms_norm_dgrad as rms_norm_dgrad
from zbkern.kernels.reference.norm import rms_norm_fwd as rms_norm_fwd
from zbkern.kernels.reference.rotary import rotary_dgrad as rotary_dgrad
from zbkern.kernels.reference.rotary import rotary_fwd as rotary_fwd
from zbkern.kernels.reference.rotary import rotated as rotated
