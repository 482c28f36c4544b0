"""The contract of every raw launch: names, shapes, dtypes. `reference.py` is the same contract in plain torch.

Notation
    M   rows: all leading dimensions of an activation flattened (batch, sequence)
    K   input features          N   output features
    x [M, K]    weight [N, K]    bias [N]    y, dy [M, N]    dx [M, K]    dweight [N, K]    dbias [N]
    z [M, N]    the value before an activation, dz its gradient

Rules
    - A launch is named `{op}_{fwd,dgrad,wgrad}`, writes into the outputs it is given and returns None.
    - It runs on the current stream, never synchronises, and a wgrad never allocates more than its implementation says.
    - A wgrad is `launch(segments, outputs, accumulate)`: it sums over all segments (one per microbatch, of any length)
      and writes (accumulate=False) or adds (accumulate=True) to every output that is not None. This is the launch
      that `WGradTask` holds, so tasks of one weight merge by joining their segments.
    - Outputs may have a wider dtype than the inputs: a bf16 product accumulates into an fp32 gradient.
    - Zero rows are legal: outputs are written as the sum over nothing.

Launches
    linear_fwd(x, weight, bias | None, y)                      y = x weight^T + bias
    linear_dgrad(dy, weight, dx)                               dx = dy weight
    linear_wgrad([(x, dy), ...], (dweight, dbias), accumulate) dweight = sum dy^T x,  dbias = sum over rows of dy
    activation_fwd(z, activation, y)                           y = activation(z)
    activation_bwd(dy, z, activation, dz)                      dz = dy activation'(z)
"""

from __future__ import annotations

LAUNCHES = ("linear_fwd", "linear_dgrad", "linear_wgrad", "activation_fwd", "activation_bwd")

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")

IMPLEMENTATIONS = ("cuda", "triton", "torch")
"""In the order in which impl="auto" prefers them."""
