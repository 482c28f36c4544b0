"""Drop-in modules: arguments, parameters and state_dict keys of their torch twins, with separable B and W.

Each takes `impl`, "auto", "cuda", "triton" or "torch", as the functions of `zbkern.functional` do; a named one that
cannot run raises UnavailableError when the module is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbkern import functional
from zbkern.kernels.reference import activation_function
from zbkern.ops import checks
from zbkern.ops.expert_parallel import ExpertParallel
from zbkern.wgrad import current

__all__ = [
    "MLP",
    "Attention",
    "Embedding",
    "ExpertParallel",
    "Experts",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "RMSNorm",
]


class Layer(torch.nn.Module):
    """Base of all layers: the name that errors and the queue use, and which implementation computes the layer.

    Those of which torch has a twin take its arguments, and impl; the others device and dtype, by name, as torch's do.
    """

    zbkern_name = ""
    zbkern_impl = "auto"

    def __init__(self, *args: Any, impl: str = "auto", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zbkern_impl = checks.check_choice(type(self).__name__, "impl", impl, checks.IMPLEMENTATIONS)

    def extra_repr(self) -> str:
        options = [] if self.zbkern_impl == "auto" else [f"impl={self.zbkern_impl!r}"]
        return ", ".join([*filter(None, [super().extra_repr()]), *options])


class Linear(Layer, torch.nn.Linear):
    """torch.nn.Linear whose weight gradient can be deferred: input [..., in_features], output [..., out_features]."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, self.bias, impl=self.zbkern_impl, name=self.zbkern_name)


class Embedding(Layer, torch.nn.Embedding):
    """torch.nn.Embedding whose whole backward can be deferred: input [...] integers, output [..., embedding_dim].

    max_norm, scale_grad_by_freq and sparse are torch's alone: with one of them set this is torch's module.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            return super().forward(input)
        return functional.embedding(input, self.weight, self.padding_idx, impl=self.zbkern_impl, name=self.zbkern_name)


class LayerNorm(Layer, torch.nn.LayerNorm):
    """torch.nn.LayerNorm over the last dimension; the end of its weights' gradients can be deferred.

    With a residual, forward returns (norm of the sum, sum), as functional.layer_norm does.
    """

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if len(self.normalized_shape) != 1:
            return _added(super().forward, input, residual)
        return functional.layer_norm(
            input, self.weight, self.bias, self.eps, self.zbkern_impl, residual=residual, name=self.zbkern_name
        )


class RMSNorm(Layer, torch.nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension; the end of its weight's gradient can be deferred.

    With a residual, forward returns (norm of the sum, sum), as functional.rms_norm does.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if len(self.normalized_shape) != 1:
            return _added(super().forward, x, residual)
        return functional.rms_norm(x, self.weight, self.eps, self.zbkern_impl, residual=residual, name=self.zbkern_name)


def _added(norm: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """torch's own norm of x, or of the sum beside the sum."""
    if residual is None:
        return norm(x)
    summed = x + residual
    return norm(summed), summed


class TransposedLinear(Layer):
    """Behaviour of the Conv1D of the transformers library: a linear whose weight is stored [in, out]. See `convert`."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(
            x, self.weight, self.bias, impl=self.zbkern_impl, transposed=True, name=self.zbkern_name
        )


class ForeignRMSNorm(Layer):
    """Behaviour of an RMSNorm that another library, or its user, has written. See `convert`."""

    weight: Tensor

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*inputs, *named.values())  # its name is the library's matter
        if x.dtype != self.weight.dtype:
            return super().forward(x)  # so is the dtype that then comes out
        y = functional.rms_norm(x, self.weight, eps_of(self), self.zbkern_impl, name=self.zbkern_name)
        return y.to(x.dtype)


EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


def eps_of(norm: torch.nn.Module) -> float | None:
    """The eps of an RMSNorm, under any of the names that libraries give it; None where there is none."""
    for name in EPS_NAMES:
        if isinstance(eps := getattr(norm, name, None), float):
            return eps
    return None


class MLP(Layer):
    """The gated MLP as one op: down(activation(gate(x)) * up(x)); input and output [..., dim].

    activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU), "relu". bias: whether the three products have one.
    hidden_dim: outputs of gate and up. The three linears are called one by one where one of them is more than its
    product: where it has hooks or DTensor weights (tensor parallelism), or was replaced by another module.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: str = "silu",
        bias: bool = False,
        impl: str = "auto",
        **factory: Any,
    ) -> None:
        super().__init__(impl=impl)
        self.activation = activation
        self.gate, self.up = (Linear(dim, hidden_dim, bias, impl=impl, **factory) for _ in range(2))
        self.down = Linear(hidden_dim, dim, bias, impl=impl, **factory)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self.gate, self.up, self.down
        if not (_is_product(gate) and _is_product(up) and _is_product(down)):
            return down(activation_function(self.activation)(gate(x)) * up(x))
        weights, biases = (gate.weight, up.weight, down.weight), (gate.bias, up.bias, down.bias)
        return functional.gated_mlp(x, *weights, *biases, self.activation, self.zbkern_impl, name=self.zbkern_name)


def _is_product(linear: torch.nn.Module) -> bool:
    """Whether a call of this module is F.linear with its parameters and nothing else."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return (
        type(linear) in (Linear, torch.nn.Linear)
        and type(linear.weight) in (Tensor, torch.nn.Parameter)
        and not any(getattr(linear, kind) for kind in hooks)
    )


class Attention(Layer):
    """Self-attention with its projections: one product for q, k and v, the core, the output projection.

    Args:
        dim: of input and output [batch, tokens, dim].
        num_kv_heads: heads of keys and values, fewer than num_heads for grouped-query attention; num_heads when None.
        head_dim: dim / num_heads when None.
        causal, options: as in functional.attention.
        sinks: adds a parameter `sinks` [num_heads], 0 at first.

    forward: with cu_seqlens (as in functional.attention), x is [tokens, dim], sequences one after the other. rotary:
    (cos, sin), each [tokens, up to head_dim / 2], turns q and k as functional.rotary does. carry: that of a slice of
    the sequences (docs/long_context.md); x and rotary are then of the slice, cu_seqlens of the whole.

    Raises TypeError or ValueError for sizes that do not fit, with a carry where it is not causal, and without one in a
    Pipeline's forward of a slice.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        options: functional.AttentionOptions = functional.AttentionOptions(),  # noqa: B008 (it cannot change)
        bias: bool = False,
        sinks: bool = False,
        impl: str = "auto",
        **factory: Any,
    ) -> None:
        super().__init__(impl=impl)
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Attention: num_heads must be a multiple of num_kv_heads; got {num_heads} and {self.num_kv_heads}"
            )
        if head_dim is None and dim % num_heads:
            raise ValueError(f"Attention: num_heads must divide dim when head_dim is None; got {num_heads}, {dim}")
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.causal, self.options = causal, options
        self.qkv = Linear(dim, (num_heads + 2 * self.num_kv_heads) * self.head_dim, bias, impl=impl, **factory)
        self.output = Linear(num_heads * self.head_dim, dim, bias, impl=impl, **factory)
        self.sinks = torch.nn.Parameter(torch.zeros(num_heads, **factory)) if sinks else None

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        carry: Any = None,
    ) -> Tensor:
        if carry is None and not torch.compiler.is_compiling() and (found := current()) and found[0]._in_slice:
            raise ValueError(
                "Attention: carry must be handed to it in a schedule with slices, or it sees nothing of earlier ones: "
                "attention(x, carry=carry), with what the chunk's forward gets; got None"
            )
        turning = [self.num_heads + self.num_kv_heads, self.num_kv_heads]
        qk, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(turning, dim=-2)
        if rotary is not None:
            qk = functional.rotary(qk, *rotary, impl=self.zbkern_impl)
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=-2)
        cu_seqlens_k = None
        if carry is not None:
            k, v, cu_seqlens, cu_seqlens_k = self._with_earlier(k, v, cu_seqlens, carry)
        y = functional.attention(
            *(q, k, v, self.causal, self.options, cu_seqlens, cu_seqlens_k),
            impl=self.zbkern_impl,
            sinks=self.sinks,
            name=self.zbkern_name,
        )
        return self.output(y.flatten(-2))

    def _with_earlier(
        self, k: Tensor, v: Tensor, cu_seqlens: Sequence[int] | Tensor | None, carry: Any
    ) -> tuple[Tensor, Tensor, Any, Any]:
        """Keys and values with those of slices before, and where packed sequences end among queries and keys."""
        if not self.causal:
            raise ValueError("Attention: carry needs causal=True: in a slice no later keys are known")
        packed = cu_seqlens is not None
        window = None if packed else self.options.window
        own = k.shape[-3]
        k, v = (carry.append((self, name), each, each.dim() - 3, window) for name, each in (("k", k), ("v", v)))
        if not packed:
            return k, v, None, None
        ends = torch.as_tensor(cu_seqlens).clamp(max=len(k))
        return k, v, (ends - (len(k) - own)).clamp(min=0), ends


class Experts(Layer):
    """Gated MLPs, one per expert: input [M, dim] sorted by expert, how many rows each has, output [M, dim].

    The first arguments are those of torchtitan's GroupedExperts, the parameters those of the transformers library:
    gate_up_proj [E, 2 hidden_dim, dim], down_proj [E, dim, hidden_dim] (or, transposed, inputs before outputs) and,
    with bias, gate_up_proj_bias [E, 2 hidden_dim] and down_proj_bias [E, dim]. gate, counts and offsets are those of
    functional.grouped_mlp: gpt-oss has bias, transposed and GateOptions(interleaved=True, limit=7, alpha=1.702,
    offset=1).
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        gate: functional.GateOptions = functional.GateOptions(),  # noqa: B008 (it cannot change)
        bias: bool = False,
        transposed: bool = False,
        impl: str = "auto",
        **factory: Any,
    ) -> None:
        super().__init__(impl=impl)
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        self.gate, self.transposed = gate, transposed

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(num_experts, *shape, **factory))

        first, second = (2 * hidden_dim, dim), (dim, hidden_dim)
        self.gate_up_proj = parameter(*(reversed(first) if transposed else first))
        self.down_proj = parameter(*(reversed(second) if transposed else second))
        self.gate_up_proj_bias = parameter(2 * hidden_dim) if bias else None
        self.down_proj_bias = parameter(dim) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every expert's products as torch.nn.Linear starts."""
        _reset(self.gate_up_proj, self.gate_up_proj_bias, self.dim)
        _reset(self.down_proj, self.down_proj_bias, self.hidden_dim)

    def forward(
        self, x: Tensor, counts: Sequence[int] | Tensor | None = None, *, offsets: Tensor | None = None
    ) -> Tensor:
        return functional.grouped_mlp(
            *(x, self.gate_up_proj, self.down_proj, counts, (self.gate_up_proj_bias, self.down_proj_bias), self.gate),
            impl=self.zbkern_impl,
            offsets=offsets,
            transposed=self.transposed,
            name=self.zbkern_name,
        )


def _reset(weight: Tensor, bias: Tensor | None, inputs: int) -> None:
    """Fills in the start values of a torch.nn.Linear with so many inputs."""
    bound = inputs**-0.5 if inputs else 0
    torch.nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        torch.nn.init.uniform_(bias, -bound, bound)


class LinearCrossEntropy(Layer, torch.nn.Linear):
    """A head and its loss: input [..., in_features], target [...]; the loss of functional.linear_cross_entropy.

    Arguments are those of torch.nn.Linear, but no bias where none is asked for; and reduction, options and impl.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *args: Any,
        reduction: str = "mean",
        options: functional.CrossEntropyOptions = functional.CrossEntropyOptions(),  # noqa: B008 (it cannot change)
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, *args, **kwargs)
        self.reduction, self.options = reduction, options

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return functional.linear_cross_entropy(
            *(input, self.weight, target, self.bias, self.reduction, self.options, self.zbkern_impl),
            name=self.zbkern_name,
        )
