"""All Triton kernels as one module: what `dispatch` resolves impl="triton" to."""

from __future__ import annotations

from zbkern.kernels.triton.activation import activation_bwd as activation_bwd
from zbkern.kernels.triton.activation import activation_fwd as activation_fwd
from zbkern.kernels.triton.activation import gated_bwd as gated_bwd
from zbkern.kernels.triton.activation import gated_fwd as gated_fwd
from zbkern.kernels.triton.attention_backward import attention_dgrad as attention_dgrad
from zbkern.kernels.triton.attention_forward import attention_fwd as attention_fwd
from zbkern.kernels.triton.embedding import embedding_fwd as embedding_fwd
from zbkern.kernels.triton.embedding import embedding_wgrad as embedding_wgrad
from zbkern.kernels.triton.fp8 import fp8_linear_dgrad as fp8_linear_dgrad
from zbkern.kernels.triton.fp8 import fp8_linear_fwd as fp8_linear_fwd
from zbkern.kernels.triton.gated import gated_linear_dgrad as gated_linear_dgrad
from zbkern.kernels.triton.gated import gated_linear_fwd as gated_linear_fwd
from zbkern.kernels.triton.grouped import grouped_linear_dgrad as grouped_linear_dgrad
from zbkern.kernels.triton.grouped import grouped_linear_fwd as grouped_linear_fwd
from zbkern.kernels.triton.grouped_gated import grouped_gated_dgrad as grouped_gated_dgrad
from zbkern.kernels.triton.grouped_gated import grouped_gated_fwd as grouped_gated_fwd
from zbkern.kernels.triton.grouped_wgrad import grouped_linear_wgrad as grouped_linear_wgrad
from zbkern.kernels.triton.linear import linear_dgrad as linear_dgrad
from zbkern.kernels.triton.linear import linear_fwd as linear_fwd
from zbkern.kernels.triton.loss import cross_entropy_fwd as cross_entropy_fwd
from zbkern.kernels.triton.loss import cross_entropy_wgrad as cross_entropy_wgrad
from zbkern.kernels.triton.norm_backward import layer_norm_dgrad as layer_norm_dgrad
from zbkern.kernels.triton.norm_backward import norm_partials as norm_partials
from zbkern.kernels.triton.norm_backward import norm_wgrad as norm_wgrad
from zbkern.kernels.triton.norm_backward import rms_norm_dgrad as rms_norm_dgrad
from zbkern.kernels.triton.norm_forward import layer_norm_fwd as layer_norm_fwd
from zbkern.kernels.triton.norm_forward import rms_norm_fwd as rms_norm_fwd
from zbkern.kernels.triton.rotary import rotary_dgrad as rotary_dgrad
from zbkern.kernels.triton.rotary import rotary_fwd as rotary_fwd
from zbkern.kernels.triton.wgrad import linear_dgrad_sum as linear_dgrad_sum
from zbkern.kernels.triton.wgrad import linear_wgrad as linear_wgrad
from zbkern.kernels.triton.wgrad import linear_wgrads as linear_wgrads
