"""The contract of every kernel: names, shapes, dtypes. `reference/` is the same contract in plain torch.

Notation
    M   rows: all leading dimensions of an activation flattened (batch, sequence)
    K   input features          N   output features         H   hidden features of an MLP
    E   groups (experts)        V   vocabulary              P   partial sums that a backend chooses to keep
    x [M, K]    weight [N, K]    bias [N]    y, dy [M, N]    dx [M, K]    dweight [N, K]    dbias [N]
    z [M, N]    the value before an activation, dz its gradient
    S   the statistics' dtype: float32, or float64 where x is float64
    T   tokens of all sequences of a batch one after the other; B sequences; D head size of q and k, Dv of v;
        Hq query, Hk key/value heads

Rules
    - A kernel is named `{op}_{fwd,dgrad,bwd,wgrad}`, or for what it makes where nothing is differentiated. It writes
      into the outputs it is given and returns None.
    - It runs on the current stream, never synchronises, and a wgrad allocates only what its docstring says.
    - A wgrad is `kernel(segments, outputs, accumulate)`: it sums over all segments (one per microbatch, of any length)
      and writes (accumulate=False) or adds (accumulate=True) to every output that is not None. This is the kernel
      that a `WGradTask` holds, so tasks of one weight merge by joining their segments. Options come last, by keyword.
    - Outputs may have a wider dtype than the inputs: a bf16 matmul accumulates into an fp32 gradient.
    - Zero rows are legal: outputs are written as the sum over nothing.
    - Matrices may be transposed views (a weight that is stored [K, N]); the last two strides decide.

Kernels
    linear_fwd(x, weight, bias | None, y, activation=None, z=None)
                                                               y = activation(z), z = x weight^T + bias, written if
                                                               given; without an activation y is z
    linear_dgrad(dy, weight, dx)                               dx = dy weight
    linear_dgrad_sum([(dy, weight), ...], dx)                  dx = sum dy weight, over layers that share their input
    linear_wgrad([(x, dy), ...], (dweight, dbias), accumulate) dweight = sum dy^T x,  dbias = sum over rows of dy
    linear_wgrads([(segments, outputs), ...], accumulate)      linear_wgrad of several layers; cuda, triton: one kernel,
                                                               with max_tiles=0: a block ends after so many tiles, for
                                                               work on other streams; 0 for no bound

    activation_fwd(z, activation, y)                           y = activation(z)
    activation_bwd(dy, z, activation, dz)                      dz = dy activation'(z)

    gated_fwd(gate, up, activation, h)                         h = activation(gate) * up,  all [M, H]
    gated_bwd(dh, gate, up, activation, dgate, dup, h)         both gradients, and h once more

    gated_linear_fwd(x, weight_gate [H, K], weight_up [H, K], bias_gate | None, bias_up | None, activation, gate, up, h)
                                                               two linear_fwd, then gated_fwd
    gated_linear_dgrad(dy, down [N, H], gate, up, activation, dgate, dup, h)
                                                               linear_dgrad to dh, then gated_bwd; dh is not kept

    grouped_linear_fwd(x, weight [E, N, K], bias [E, N] | None, ends [E] int32, y)
                                                               y = x weight[e]^T + bias[e] in rows of group e, which go
                                                               from ends[e - 1] (0 for the first) to ends[e]; ends is
                                                               on x's device. Rows from the last end on belong to no
                                                               group: outputs are 0 there, and no sum contains them
    grouped_linear_dgrad(dy, weight, ends, dx)
    grouped_linear_wgrad([(x, dy, ends), ...], (dweight, dbias), accumulate)
                                                               dweight[e], dbias[e]: sums over the rows of group e
    grouped_gated_fwd(x, weight [E, 2 H, K], bias [E, 2 H] | None, ends, options, z [M, 2 H], h [M, H])
                                                               grouped_linear_fwd to z, then h of `GateOptions`
    grouped_gated_dgrad(dy, weight [E, N, H], ends, z, options, dz [M, 2 H], h)
                                                               grouped_linear_dgrad to dh, which is not kept, then the
                                                               gradient of z, and h once more

    embedding_fwd(indices [M], weight [V, K], y [M, K])        y[i] = weight[indices[i]]
    embedding_wgrad([(indices, dy), ...], (dweight,), accumulate, padding_idx=None)
                                                               dweight[v] = sum of dy[i] over all i with indices[i] = v;
                                                               nothing for v = padding_idx

    norm_partials(M, K, device) -> P                           how many partial sums the two below leave
    norm_fwd(x, weight | None, bias | None, eps, y, mean [M] S | None, rstd [M] S, residual=None, summed=None)
                                                               y = (x - mean) rstd weight + bias, rstd = 1 / sqrt(mean(
                                                               (x - mean)^2) + eps); without a mean that of RMSNorm,
                                                               y = x rstd weight. With residual [M, K]: the
                                                               norm of summed = x + residual, kept, in x's dtype
    norm_dgrad(dy, x, weight | None, mean | None, rstd, dx, partials [2 or, without a mean, 1, P, K] S | None,
               dsummed=None)                                   dx = rstd (g - mean(g) - normal mean(g normal)) with
                                                               g = dy weight and normal = (x - mean) rstd; partials: of
                                                               the sums over rows of dy normal and of dy. x is what was
                                                               normed (summed, where there is a residual); dsummed
                                                               [M, K], if given, is added to dx
    norm_wgrad([(partials,), ...], (dweight, [dbias]), accumulate)           sums over P of partials[0], of partials[1]

    attention_fwd(q [T, Hq, D], k [T', Hk, D], v [T', Hk, Dv], options, y [T, Hq, Dv], lse [Hq, T] S, sinks=None)
                                                               y = softmax(cap(scale q k^T) + mask) v per sequence and
                                                               head, cap(s) = softcap tanh(s / softcap) where there is
                                                               one. sinks [Hq] S: scores of a key without a value. lse:
                                                               log of the softmax's denominator. Where a query sees no
                                                               key y is 0
    attention_dgrad(dy, q, k, v, y, lse, options, dq, dk, dv, delta=None)
                                                               dv = p^T dy, dq = scale ds k, dk = scale ds^T q with
                                                               ds = p (dy v^T - delta) cap'. delta [Hq, T] S, if given:
                                                               sum(dy y), of which dsinks = -sum over T of
                                                               exp(sinks - lse) delta

    rotary_fwd(x [B, T, H, D], cos [T, R/2], sin [T, R/2], interleaved, y [B, T, H, D])
                                                               (a, b) -> (a cos - b sin, b cos + a sin) on every pair of
                                                               the first R columns: (c, c + R/2), interleaved (2c, 2c+1)
    rotary_dgrad(dy, cos, sin, interleaved, dx)                the same with -sin

    cross_entropy_fwd(x, weight [V, K], bias | None, target [M], options, loss [M] S, lse [M] S, dx | None,
                      gradients=None)                          loss = (1 - s) (lse - z[target]) + s (lse - mean z) +
                                                               z_loss lse^2 with s = label_smoothing and z = x weight^T
                                                               + bias, capped as scores are; 0 where a row is ignored.
                                                               dx = dz weight with dz of a row's own loss; gradients
                                                               (dweight, dbias) | None: of the sum of all losses
    cross_entropy_wgrad([(x, target, lse, dloss [M]), ...], (dweight, dbias), accumulate, weight, bias | None, options)
                                                               sums of dz^T x and of dz, of logits computed again

    float8_amax(x, amax [P] float32)                           the largest |x| of P parts of x, 0 of an empty part; nan
                                                               is the largest. P is whatever the caller likes, and
                                                               amax and scale are contiguous
    float8_cast(x [M, K], amax [P] | None, power_of_2, y [M, K] in 8 bits, scale float32)
                                                               y = x scale in float32, rounded to the nearest, with
                                                               scale = y's largest finite number / max(a,
                                                               SMALLEST_AMAX), in float64: a is each row's largest |x|
                                                               and scale [M], or with amax the largest of that and scale
                                                               one number. power_of_2: 2^floor(log2(scale)). K > 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Segments = Sequence[tuple[Tensor, ...]]
Outputs = Sequence[Tensor | None]

OPS = {
    "linear": ("linear_fwd", "linear_dgrad", "linear_wgrad", "linear_wgrads", "activation_fwd", "activation_bwd"),
    "gated_mlp": (
        *("gated_linear_fwd", "linear_fwd", "gated_linear_dgrad", "linear_dgrad_sum", "linear_wgrad"),
        *("gated_fwd", "gated_bwd"),
    ),
    "grouped_linear": ("grouped_linear_fwd", "grouped_linear_dgrad", "grouped_linear_wgrad"),
    "grouped_mlp": (
        *("grouped_gated_fwd", "grouped_linear_fwd", "grouped_gated_dgrad", "grouped_linear_dgrad"),
        "grouped_linear_wgrad",
    ),
    "embedding": ("embedding_fwd", "embedding_wgrad"),
    **dict.fromkeys(("rms_norm", "layer_norm"), ("norm_partials", "norm_fwd", "norm_dgrad", "norm_wgrad")),
    "attention": ("attention_fwd", "attention_dgrad", "norm_wgrad"),
    "rotary": ("rotary_fwd", "rotary_dgrad"),
    "linear_cross_entropy": ("cross_entropy_fwd", "cross_entropy_wgrad"),
    "float8": ("float8_amax", "float8_cast"),
}
"""The kernels that a backend must have to run an op."""

KERNELS = tuple(dict.fromkeys(kernel for kernels in OPS.values() for kernel in kernels))

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")

SMALLEST_AMAX = 1e-12
"""Below it a scale to 8 bits grows no more, as in torchao."""

IMPLEMENTATIONS = ("cuda", "triton", "torch")
"""In the order in which impl="auto" prefers them."""


@dataclass(frozen=True)
class GateOptions:
    """h = activation(alpha gate) / alpha * (up + offset), of gate and up in z [M, 2 H], limited before that.

    interleaved: gate is every second column of z from the first on, and up those between; else gate is the first half.
    limit: gate is cut off above it, up above it and below -limit; None for no limit. With alpha 1.702, limit 7 and
    offset 1 this is gpt-oss's gate.
    """

    activation: str = "silu"
    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class AttentionOptions:
    """scale: of the scores. causal: query i sees keys up to i + (keys - queries), the ends of both lined up.

    window: with causal, how many keys a query sees, its own included; None for all. queries, keys: where each sequence
    begins, and the end of the last: B + 1 numbers from 0 to T (T'). Both are tuples, or both int32 or int64 tensors on
    the device, which kernels read there; these may end before T (T'), and tokens beyond are a sequence without keys
    (queries). softcap: the largest score, reached smoothly; None for no bound.
    """

    scale: float
    causal: bool
    window: int | None
    queries: tuple[int, ...] | Tensor
    keys: tuple[int, ...] | Tensor
    softcap: float | None = None


@dataclass(frozen=True)
class CrossEntropyOptions:
    """ignore_index: targets whose rows count nothing. label_smoothing: weight of the uniform distribution.

    z_loss: factor of the squared log-sum-exp. chunk: rows whose logits exist at one time. softcap: logits become
    softcap tanh(logit / softcap), as in Gemma 2; None for no cap.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk: int = 1024
    softcap: float | None = None


def largest_head(dtype: torch.dtype) -> int:
    """The largest head of attention that fits the registers of one program of the Triton kernels."""
    return 128 if dtype == torch.float32 else 256
