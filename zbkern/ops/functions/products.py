"""Matrix products and convolutions with a parameter, or with a part of one, whose W can wait.

A `ParameterView` says which parameter an operand is part of, and where it lies in its memory: an expert's matrix
`weight[3]`, a transposed one, one in another dtype, those of the tokens' experts `weight[experts]`. The gradient of the
part is added there when W runs; nothing of the parameter's size is allocated for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbkern.ops.autograd import OpCall, differentiable_backward, weight_gradients
from zbkern.ops.functions._shapes import as_rows
from zbkern.ops.functions.sharded import local_part, own_part
from zbkern.wgrad import Segment, WGradKernel


class WeightPart(NamedTuple):
    """Where a view lies in a whole, which is its parameter or, with rows, parameter[rows]. offset: in elements."""

    whole_size: tuple[int, ...]
    whole_stride: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    rows: bool = False

    @property
    def is_whole(self) -> bool:
        return (self.size, self.stride, self.offset) == (self.whole_size, self.whole_stride, 0)

    def within(self, whole: Tensor) -> Tensor:
        """The view in the memory of a tensor that lies there as the whole does."""
        if self.is_whole:
            return whole
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)

    def values(self, parameter: Any, rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The view's values, with their graph. rows: the one index, if it has rows."""
        whole = own_part(parameter)
        return self.within(whole[rows[0]] if rows else whole).to(dtype)

    def add(self, gradient: Tensor, value: Tensor, rows: Sequence[Tensor] = ()) -> None:
        """gradient += what value, the gradient of the view, is as one of the parameter."""
        if not rows and gradient.stride() == self.whole_stride:
            self.within(gradient).add_(value)
            return
        whole = value
        if not self.is_whole:
            whole = torch.empty_strided(self.whole_size, self.whole_stride, dtype=value.dtype, device=value.device)
            self.within(whole.zero_()).add_(value)
        if rows:
            gradient.index_put_((rows[0],), whole.to(gradient.dtype), accumulate=True)  # counts from the end, too
        else:
            gradient.add_(whole)


@dataclass(slots=True, eq=False)
class ParameterView:
    """A tensor that is a parameter or a part of one.

    whole: the parameter's values, or the rows of it that an index chose; memory: the view in these; value: its values,
    perhaps in another dtype.
    """

    parameter: Tensor
    whole: Tensor
    memory: Tensor
    value: Tensor
    rows: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, parameter: Tensor, values: Tensor) -> ParameterView:
        """All of it. values: detached, of a DTensor this rank's part."""
        return cls(parameter, values, values, values)

    @property
    def part(self) -> WeightPart:
        whole, memory = self.whole, self.memory
        offset = int(memory.storage_offset() - whole.storage_offset())
        return WeightPart(
            tuple(whole.shape), whole.stride(), tuple(memory.shape), memory.stride(), offset, bool(self.rows)
        )

    @property
    def is_parameter(self) -> bool:
        """Whether it is a whole parameter, in its own dtype."""
        return self.memory is self.whole and not self.rows and self.value.dtype == self.parameter.dtype

    def t(self) -> ParameterView:
        return replace(self, memory=self.memory.t(), value=self.value.t())

    def to(self, dtype: torch.dtype) -> ParameterView:
        return self if self.value.dtype == dtype else replace(self, value=self.value.to(dtype))


@dataclass(frozen=True, eq=False)
class Kind:
    """A function of an input and a weight that is linear in both.

    forward(x, w) -> y; dgrad(dy, x, w) -> dx; wgrad(x, dy, w) -> dw, of which only shapes and dtypes of w are read.
    """

    name: str
    forward: Callable[..., Tensor]
    dgrad: Callable[..., Tensor]
    wgrad: Callable[..., Tensor]


LINEAR = Kind(
    "linear",
    torch.nn.functional.linear,
    lambda dy, x, w: torch.matmul(dy, w),
    lambda x, dy, w: as_rows(dy).mT @ as_rows(x),
)
MATMUL = Kind(
    "x @ w",
    torch.matmul,
    lambda dy, x, w: torch.matmul(dy, w.mT).sum_to_size(x.shape),
    lambda x, dy, w: torch.matmul(x.mT, dy).sum_to_size(w.shape),
)
MATMUL_LEFT = Kind(
    "w @ x",
    lambda x, w: torch.matmul(w, x),
    lambda dy, x, w: torch.matmul(w.mT, dy).sum_to_size(x.shape),
    lambda x, dy, w: torch.matmul(dy, x.mT).sum_to_size(w.shape),
)
GROUPED = Kind(
    "grouped_mm",
    lambda x, w, ends: torch._grouped_mm(x, w, ends),
    lambda dy, x, w, ends: torch._grouped_mm(dy, w.mT, ends),
    lambda x, dy, w, ends: torch._grouped_mm(x.mT, dy, ends),
)


@functools.cache
def einsum(equation: str) -> Kind | None:
    """torch.einsum of an input and a weight; None where its gradients are not two more of them."""
    operands, arrow, y = equation.replace(" ", "").replace("...", ".").partition("->")
    x, comma, w = operands.partition(",")
    if not arrow or not comma or "," in w or "." in w:
        return None
    if any(len(set(letters)) < len(letters) for letters in (x, w, y)):
        return None  # a diagonal
    if not (set(x) <= set(w + y) and set(w) <= set(x + y) and set(y) <= set(x + w)):
        return None  # a sum over one operand alone
    x, y = (letters.replace(".", "...") for letters in (x, y))  # an ellipsis that the result lacks is summed over
    return Kind(
        f"einsum {equation}",
        lambda a, b: torch.einsum(f"{x},{w}->{y}", a, b),
        lambda dy, a, b: _of_shape(torch.einsum(f"{y},{w}->{x}", dy, b), a.shape),
        lambda a, dy, b: _of_shape(torch.einsum(f"{x},{y}->{w}", a, dy), b.shape),
    )


def _of_shape(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient of an operand of this shape where axes of one element, in it or in the other, were repeated."""
    if gradient.shape == shape:
        return gradient
    return gradient.expand(torch.broadcast_shapes(gradient.shape, shape)).sum_to_size(shape)


def _convolution(name: str, transposed: bool) -> Kind:
    def forward(
        x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, output_padding: Any, groups: int
    ) -> Tensor:
        return torch.convolution(x, w, None, stride, padding, dilation, transposed, output_padding, groups)

    def gradient(of: int, dy: Tensor, x: Tensor, w: Tensor, options: Sequence[Any]) -> Tensor:
        """The gradient of x (of=0) or of w (of=1)."""
        *places, output_padding, groups = options
        others = transposed, output_padding, groups, [of == 0, of == 1, False]
        return torch.ops.aten.convolution_backward(dy, x, w, None, *places, *others)[of]

    return Kind(
        name,
        forward,
        lambda dy, x, w, *options: gradient(0, dy, x, w, options),
        lambda x, dy, w, *options: gradient(1, dy, x, torch.empty_like(w, device=x.device), options),
    )


CONVOLUTION, TRANSPOSED_CONVOLUTION = _convolution("convolution", False), _convolution("transposed convolution", True)


class ProductFunction(torch.autograd.Function):
    """y = kind.forward(x, weight, *options). B: dx. W: added to the weight's part of its parameter's gradient."""

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, x: Tensor, kind: Kind, view: ParameterView, options: tuple[Any, ...], *edges: Any
    ) -> Tensor:
        y = kind.forward(x, view.value, *options)
        if y._is_view():  # autograd lets nobody modify a view from a function in place
            y = torch.ops.aten._unsafe_view(y, y.shape)
        tensors = [option for option in options if isinstance(option, Tensor)]
        ctx.save_for_backward(x, view.value, *view.rows, *tensors)
        ctx.call, ctx.kind, ctx.part, ctx.numbers = call, kind, view.part, options[len(tensors) :]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call, kind, part = ctx.call, ctx.kind, ctx.part
        x, weight, *others = ctx.saved_tensors
        rows, options = others[: part.rows], (*others[part.rows :], *ctx.numbers)
        if torch.is_grad_enabled():  # create_graph=True

            def again(parameter: Tensor, x: Tensor) -> Tensor:
                return kind.forward(x, part.values(parameter, rows, weight.dtype), *options)

            _, dx, *second = differentiable_backward(call, again, (x,), dy)
            return None, dx, None, None, None, *second
        dx = kind.dgrad(dy, x, weight, *options) if ctx.needs_input_grad[1] else None
        kernel = product_wgrad(kind, part, weight.dtype, ctx.numbers, call.backend)
        segment = (x.detach(), dy, *others)
        weights = weight_gradients(call, kernel, segment, ctx.needs_input_grad, 2 * dy.numel() * x.shape[-1])
        return None, dx, None, None, None, *weights


class ViewValue(torch.autograd.Function):
    """A view of a parameter as a value: its gradient is computed in B and waits to be added to the parameter's.

    For operands of elementwise operations, whose gradient is no product: computing it later would save nothing. Other
    functions take it, too; where one multiplies, `coverage` says that B computes its gradient.
    """

    @staticmethod
    def forward(ctx: Any, call: OpCall, value: Tensor, view: ParameterView, *edges: Any) -> Tensor:
        ctx.save_for_backward(*view.rows)
        ctx.call, ctx.part = call, view.part
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        part, rows = ctx.part, ctx.saved_tensors
        if torch.is_grad_enabled():
            _, *weights = differentiable_backward(ctx.call, lambda p: part.values(p, rows, dy.dtype), (), dy)
        else:
            kernel = value_wgrad(part)
            weights = [*weight_gradients(ctx.call, kernel, (dy, *rows), ctx.needs_input_grad, dy.numel())]
        return None, None, None, *weights


@functools.cache
def product_wgrad(
    kind: Kind, part: WeightPart, dtype: torch.dtype, numbers: tuple[Any, ...], backend: Any
) -> WGradKernel:
    """W of a product, of segments (x, dy, *rows, *options that are tensors). numbers: the other options.

    The same object for the same part of a parameter, so that tasks of several microbatches merge.
    """
    like = torch.empty_strided(part.size, part.stride, dtype=dtype, device="meta")

    def run(segments: Sequence[Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
        gradient = _begun(outputs, accumulate)
        if kind is LINEAR and not part.rows and gradient.stride() == part.whole_stride:
            pairs = [(as_rows(x), as_rows(dy)) for x, dy in segments]
            backend.linear_wgrad(pairs, (part.within(gradient), None), True)
            return
        for x, dy, *others in segments:
            rows, options = others[: part.rows], others[part.rows :]
            part.add(gradient, kind.wgrad(x, dy, like, *options, *numbers), rows)

    return WGradKernel(run)


@functools.cache
def value_wgrad(part: WeightPart) -> WGradKernel:
    """W of a value: its gradients, added up. Segments: dy, and the rows if it has some."""

    def run(segments: Sequence[Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
        gradient = _begun(outputs, accumulate)
        for dy, *rows in segments:
            part.add(gradient, dy, rows)

    return WGradKernel(run)


def _begun(outputs: Sequence[Tensor | None], accumulate: bool) -> Tensor:
    """The one output, of the whole parameter, at zero where it is to be written: a part is added to it."""
    (gradient,) = outputs
    assert gradient is not None
    gradient = local_part(gradient)
    return gradient if accumulate else gradient.zero_()
