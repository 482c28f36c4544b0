"""Matrix products and convolutions with a parameter, or with a view of one, whose W can wait.

`ParameterView` says which parameter an operand is part of and how to find that part in a gradient of the whole
parameter: an expert's matrix `weight[3]`, a transposed one, one in another dtype, those of the tokens' experts
`weight[experts]`. The gradient of the part is added there when W runs; nothing of the parameter's size is allocated
for it. A `ComputedWeight` was made of several parameters (`scale * weight`, a weight normalisation): W makes it once
more, with the graph through which its gradient reaches them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbkern import wgrad
from zbkern.ops.autograd import OpCall, differentiable_backward, weight_gradients
from zbkern.ops.functions._shapes import as_rows
from zbkern.ops.functions.sharded import is_sharded, local_part
from zbkern.wgrad import Segment, WGradKernel, fsdp

Step = tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterView:
    """`parameter` after `steps`, each (function, further arguments, keyword arguments); value: the result, detached."""

    parameter: Tensor
    steps: tuple[Step, ...]
    value: Tensor

    def then(self, function: Callable[..., Tensor], *args: Any) -> ParameterView:
        """The view that one more step makes."""
        return ParameterView(self.parameter, (*self.steps, (function, args, ())), function(self.value, *args))

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.parameter,)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for views that find the same part: W of several microbatches is one launch then."""
        return tuple((function, repr(args), repr(kwargs)) for function, args, kwargs in self.steps)


def tensors_in(argument: Any) -> list[Tensor]:
    """The tensors among arguments or results, as deep as torch's functions take them."""
    found = []
    for value in argument.values() if isinstance(argument, dict) else argument:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list | dict) and value:
            found += tensors_in(value)
    return found


def replaced(argument: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments as `tensors_in` walks them, with change(leaf) for each leaf: a tenth of the time of torch's pytree."""
    if isinstance(argument, tuple | list):
        values = [replaced(value, change) for value in argument]
        return type(argument)(*values) if hasattr(argument, "_fields") else type(argument)(values)
    if isinstance(argument, dict):
        return {key: replaced(value, change) for key, value in argument.items()}
    return change(argument)


class Recipe:
    """function(*args, **kwargs) of parameters alone: views of them, and recipes, stand for tensors in the arguments.
    index: which of the function's results; None for the only one."""

    __slots__ = ("_arguments", "_constants", "_function", "_index")

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None = None
    ) -> None:
        self._function, self._arguments, self._index = function, (args, kwargs), index
        tensors = tensors_in(self._arguments)
        self._constants = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def make(self, made: dict[int, Any]) -> Any:
        """The function's result. made: what stands for the parameters, by their ids; results on the way are added.

        Raises RuntimeError where a tensor that is no parameter was changed in place, as torch's backward does.
        """
        if id(self) not in made:
            if any(tensor._version != version for tensor, version in self._constants):
                raise RuntimeError(
                    f"{self._function.__name__}: a tensor from which a weight was computed has been modified in place "
                    "between the forward and W; clone it for the forward"
                )
            args, kwargs = replaced(self._arguments, lambda leaf: _stand_in(leaf, made))
            result = self._function(*args, **kwargs)
            made[id(self)] = result if self._index is None else result[self._index]
        return made[id(self)]


def by_id(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> dict[int, Any]:
    """What `Recipe.make` takes."""
    return dict(zip(map(id, parameters), values, strict=True))


def _stand_in(leaf: Any, made: dict[int, Any]) -> Any:
    if isinstance(leaf, ParameterView):
        return replay(leaf.steps, made[id(leaf.parameter)])
    return leaf.make(made) if isinstance(leaf, Recipe) else leaf


@dataclass(frozen=True, slots=True, eq=False)
class ComputedWeight:
    """What `recipe` makes of `parameters`; value: the result, detached."""

    recipe: Recipe
    parameters: tuple[Tensor, ...]
    value: Tensor

    def then(self, function: Callable[..., Tensor], *args: Any) -> ComputedWeight:
        """The weight that one more step makes."""
        recipe = Recipe(function, (self.recipe, *args), {})
        return ComputedWeight(recipe, self.parameters, function(self.value, *args))


def pick(parts: Sequence[Tensor], index: int) -> Tensor:
    """A step: one of the results of a function that returns several."""
    return parts[index]


def to_local(tensor: Any) -> Any:
    """A step: this rank's part of a DTensor. Gradients come here as that part already."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def replay(steps: Sequence[Step], tensor: Any) -> Any:
    """What the steps make of another tensor."""
    for function, args, kwargs in steps:
        tensor = function(tensor, *args, **dict(kwargs))
    return tensor


def part_of(gradient: Tensor, steps: Sequence[Step]) -> Tensor | None:
    """The memory of `gradient`, of the whole parameter, that belongs to a view of it; None where there is no such."""
    kept = [step for step in steps if step[0] not in CASTS]
    if any(isinstance(argument, Tensor) for _, args, _ in kept for argument in args):
        return None
    part = replay(kept, gradient)
    return part if part.untyped_storage()._cdata == gradient.untyped_storage()._cdata else None


def add_to_part(gradient: Tensor, steps: Sequence[Step], value: Tensor) -> None:
    """gradient += what `value`, the gradient of a view, is as a gradient of the whole parameter."""
    part = part_of(gradient, steps)
    if part is not None:
        part.add_(value)
        return
    if (index := _rows_chosen(steps)) is not None:
        gradient.index_put_((index,), value.to(gradient.dtype), accumulate=True)  # counts from the end, too
        return
    if not gradient.is_contiguous():  # in another order of memory the part may be none
        whole = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
        add_to_part(whole, steps, value)
        gradient.add_(whole)
        return
    with torch.enable_grad():
        whole = torch.zeros_like(gradient, requires_grad=True)
        (found,) = torch.autograd.grad(replay(steps, whole), whole, value)
    gradient.add_(found)


def _rows_chosen(steps: Sequence[Step]) -> Tensor | None:
    """The index of parameter[index], where it is a vector of numbers, or one."""
    kept = [step for step in steps if step[0] not in (*CASTS, to_local)]
    if len(kept) != 1 or kept[0][0] is not Tensor.__getitem__:
        return None
    index = kept[0][1][0]
    return index if isinstance(index, Tensor) and index.dim() < 2 and index.dtype != torch.bool else None


CASTS = (
    *(Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    Tensor.contiguous,
)
"""Steps that a gradient does not take: it is added in whatever dtype it has."""


@dataclass(frozen=True)
class Kind:
    """A function of an input and a weight that is linear in both.

    forward(x, w) -> y; dgrad(dy, x, w) -> dx; wgrad(x, dy, w) -> dw, of which only shapes and dtypes of w are read.
    """

    name: str
    forward: Callable[..., Tensor]
    dgrad: Callable[..., Tensor]
    wgrad: Callable[..., Tensor]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


LINEAR = Kind(
    "linear",
    torch.nn.functional.linear,
    lambda dy, x, w: torch.matmul(dy, w),
    lambda x, dy, w: _rows(dy).mT @ _rows(x),
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

    def backward(dy: Tensor, x: Tensor, w: Tensor, options: Sequence[Any], mask: list[bool]) -> tuple[Any, ...]:
        *places, output_padding, groups = options
        return torch.ops.aten.convolution_backward(dy, x, w, None, *places, transposed, output_padding, groups, mask)

    return Kind(
        name,
        forward,
        lambda dy, x, w, *options: backward(dy, x, w, options, [True, False, False])[0],
        lambda x, dy, w, *options: backward(dy, x, torch.empty_like(w, device=x.device), options, [False, True, False])[
            1
        ],
    )


CONVOLUTION, TRANSPOSED_CONVOLUTION = _convolution("convolution", False), _convolution("transposed convolution", True)


_NAMED = {each.name: each for each in (LINEAR, MATMUL, MATMUL_LEFT, GROUPED, CONVOLUTION, TRANSPOSED_CONVOLUTION)}


def kind(name: str) -> Kind:
    """The kind of this name."""
    if name in _NAMED:
        return _NAMED[name]
    found = einsum(name.removeprefix("einsum "))
    assert found is not None
    return found


def numbers_of(options: Sequence[Any]) -> list[int]:
    """All numbers of a convolution's options in one list, for `convolution_options`."""
    return [number for option in options for number in (option if isinstance(option, list) else [option])]


def convolution_options(numbers: Sequence[int]) -> tuple[Any, ...]:
    """Options of a convolution from one list of all their numbers; none from none."""
    if not numbers:
        return ()
    dimensions = len(numbers) // 4
    return (*[list(numbers[at : at + dimensions]) for at in range(0, 4 * dimensions, dimensions)], numbers[-1])


def strided_steps(index: Tensor | None, part: Sequence[int]) -> tuple[Step, ...]:
    """The steps of a view of parameter[index], or of the parameter, by its place in that memory."""
    steps: list[Step] = [] if index is None else [(Tensor.__getitem__, (index,), ())]
    if part:
        count = len(part) // 2
        steps.append((in_memory, (tuple(part[:count]), tuple(part[count:-1]), part[-1]), ()))
    return tuple(steps)


def in_memory(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """A step: a part by its place in the memory of a contiguous tensor."""
    tensor = tensor.contiguous()
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class Product(torch.autograd.Function):
    """y = kind.forward(x, weight, *others). B: dx. W: added to the weight's part of its parameter's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        call: OpCall,
        x: Tensor,
        kind: Kind,
        view: ParameterView | ComputedWeight,
        options: tuple[Any, ...],
        *edges: Any,
    ) -> Tensor:
        weight = view.value
        y = kind.forward(x, weight, *options)
        if y._is_view():  # autograd lets nobody modify a view from a function in place
            y = torch.ops.aten._unsafe_view(y, y.shape)
        ctx.save_for_backward(x, weight)
        ctx.call, ctx.kind, ctx.options = call, kind, options
        if isinstance(view, ComputedWeight):
            ctx.recipe, ctx.versions = view.recipe, [version_of(p) for p in call.params]
        else:
            ctx.recipe, ctx.steps, ctx.key = None, view.steps, view.key
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call, kind, options = ctx.call, ctx.kind, ctx.options
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True

            def again(*parameters_and_x: Tensor) -> Tensor:
                *parameters, x = parameters_and_x
                if ctx.recipe is None:
                    return kind.forward(x, replay(ctx.steps, parameters[0]), *options)
                return kind.forward(x, ctx.recipe.make(by_id(call.params, parameters)), *options)

            _, dx, *second = differentiable_backward(call, again, (x,), dy)
            return None, dx, None, None, None, *second
        dx = kind.dgrad(dy, x, weight, *options) if ctx.needs_input_grad[1] else None
        segment: Segment = (x.detach(), dy)
        if ctx.recipe is None:
            kernel = product_wgrad(kind, ctx.key, ctx.steps, weight, options, call.backend)
        else:
            kernel = _computed_wgrad(kind, ctx.recipe, call.params, ctx.versions, weight, options)
            if wgrad.current() is not None and any(map(fsdp.is_gathered, call.params)):
                segment += tuple(parameter.detach().clone() for parameter in call.params)
        weights = weight_gradients(call, kernel, segment, ctx.needs_input_grad, 2 * dy.numel() * x.shape[-1])
        return None, dx, None, None, None, *weights


class Use:
    """What is known of a value's use. product: its gradient is one of matrices, which B computes."""

    __slots__ = ("product",)

    def __init__(self, product: bool) -> None:
        self.product = product


class Source(torch.autograd.Function):
    """A view of a parameter as a value: its gradient is computed in B and waits to be added to the parameter's.

    For operands of elementwise operations, whose gradient is no product: computing it later would save nothing.
    """

    @staticmethod
    def forward(ctx: Any, call: OpCall, value: Tensor, view: ParameterView, use: Use, *edges: Any) -> Tensor:
        ctx.call, ctx.steps, ctx.key, ctx.use = call, view.steps, view.key, use
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            _, *weights = differentiable_backward(ctx.call, lambda parameter: replay(ctx.steps, parameter), (), dy)
            return None, None, None, None, *weights
        kernel = _sum_wgrad(ctx.key, ctx.steps, ctx.use.product)
        return None, None, None, None, *weight_gradients(ctx.call, kernel, (dy,), ctx.needs_input_grad, dy.numel())


_KERNELS: dict[Any, WGradKernel] = {}


def product_wgrad(
    kind: Kind, key: Any, steps: Sequence[Step], weight: Tensor, options: tuple[Any, ...], backend: Any
) -> WGradKernel:
    """W of a product. The same object for the same part of a parameter, so that tasks of several microbatches merge."""
    like = torch.empty_like(weight, device="meta")

    def run(segments: Sequence[Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
        gradient = _begun(outputs, accumulate)
        part = part_of(gradient, steps) if kind is LINEAR else None
        if part is not None:
            backend.linear_wgrad([(as_rows(x), as_rows(dy)) for x, dy in segments], (part, None), True)
            return
        for x, dy in segments:
            add_to_part(gradient, steps, kind.wgrad(x, dy, like, *options))

    return _kept((kind.name, key, like.shape, like.dtype, repr(options), backend), run, steps, options)


def _computed_wgrad(
    kind: Kind,
    recipe: Recipe,
    parameters: Sequence[Tensor],
    versions: Sequence[int],
    weight: Tensor,
    options: tuple[Any, ...],
) -> WGradKernel:
    """W of a product with a computed weight: the weight's gradient, and with it those of the parameters.

    Segments: x, dy, and the parameters' values where they may be gone by now. versions: of the parameters in the
    forward; where W reads them, they must have these still.
    """
    like = torch.empty_like(weight, device="meta")

    def run(segments: Sequence[Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
        (x, dy, *values), *others = segments
        gradient = kind.wgrad(x, dy, like, *options)
        for x, dy, *_ in others:
            gradient += kind.wgrad(x, dy, like, *options)
        if not values and [version_of(p) for p in parameters] != versions:
            raise RuntimeError(
                f"{kind.name}: a parameter from which its weight was computed changed between the forward and W, which "
                "computes the weight again; run the queue before the optimizer step"
            )
        values = list(values or parameters)
        leaves = [value.detach().requires_grad_(o is not None) for value, o in zip(values, outputs, strict=True)]
        with torch.enable_grad():
            made = recipe.make(by_id(parameters, leaves))
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(made, needed, gradient.to(made.dtype), allow_unused=True)
        for output, value in zip([o for o in outputs if o is not None], found, strict=True):
            if not accumulate:
                output.zero_()
            if value is not None:
                output.add_(value)

    return WGradKernel(run)


def version_of(tensor: Tensor) -> int:
    """How often it was modified in place; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _sum_wgrad(key: Any, steps: Sequence[Step], product: bool) -> WGradKernel:
    """W of a value: its gradients, added up."""

    def run(segments: Sequence[Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
        gradient = _begun(outputs, accumulate)
        for (dy,) in segments:
            add_to_part(gradient, steps, dy)

    return _kept(("sum", key, product), run, steps, adds=product)


def _begun(outputs: Sequence[Tensor | None], accumulate: bool) -> Tensor:
    """The one output, of the whole parameter, at zero where it is to be written: a part is added to it."""
    (gradient,) = outputs
    assert gradient is not None
    gradient = local_part(gradient)
    return gradient if accumulate else gradient.zero_()


def _kept(
    key: Any, run: Callable[..., None], steps: Sequence[Step], options: Sequence[Any] = (), adds: bool = False
) -> WGradKernel:
    """The kernel of an earlier call with this key; tensors among the arguments (chosen experts) are never equal."""
    if any(isinstance(argument, Tensor) for argument in (*options, *(a for _, args, _ in steps for a in args))):
        return WGradKernel(run, adds=adds)
    return _KERNELS.setdefault(key, WGradKernel(run, adds=adds))
