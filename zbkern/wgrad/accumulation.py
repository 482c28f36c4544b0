"""Where W puts its gradient: added to or written into `.grad` or `.main_grad`, or accumulated by autograd.

Nothing here is decided before W runs. Frameworks that keep their own gradient buffers mark it on the parameter:
`main_grad` (accumulate there, any dtype), `overwrite_main_grad` (write instead of add) and `grad_added_to_main_grad`
(set to True once it is there).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zbkern.wgrad.task import Segment, WGradKernel, WGradTask


class GradientTarget:
    """The outputs of a task's kernel: gradients that exist, to be added to, or new ones, to be written.

    outputs, add: arguments of the kernel. fresh: some of them were allocated or zeroed for it, on the current stream.
    replaces: `commit` adds the result to a gradient that the kernel cannot write in place.
    """

    __slots__ = ("_owned", "_unset", "add", "fresh", "outputs", "replaces")

    def __init__(self, task: WGradTask) -> None:
        outputs: list[Tensor | None] = []
        unset: list[tuple[Tensor, Tensor]] = []  # (parameter, output) to be assigned after the kernel
        overwritten: list[Tensor] = []
        owned: list[Tensor] = []  # parameters with a main_grad
        self.replaces = False
        for parameter in task.parameters:
            if parameter is None or not parameter.requires_grad:  # frozen since its backward: autograd drops it, too
                outputs.append(None)
                continue
            gradient = main_grad_of(parameter)
            if gradient is not None:
                owned.append(parameter)
                if overwrites(parameter):
                    overwritten.append(gradient)
            else:
                gradient = parameter.grad
                if gradient is None or gradient.is_sparse:
                    self.replaces = self.replaces or gradient is not None
                    gradient = empty_gradient(parameter, task.kernel)
                    unset.append((parameter, gradient))
            outputs.append(gradient)
        self.add = True
        if unset or overwritten:
            new = [*overwritten, *(gradient for _, gradient in unset)]
            self.add = len(new) < sum(output is not None for output in outputs)
            if self.add:  # a kernel writes all or adds to all: zero those that are to be written, and add
                for gradient in new:
                    gradient.zero_()
        self.fresh = bool(unset or overwritten)
        self.outputs, self._unset, self._owned = outputs, unset, owned

    def commit(self) -> None:
        """After the kernel: assigns new gradients to their parameters, and sets the flag of those with a main_grad."""
        for parameter, gradient in self._unset:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad  # not sparse + dense
        for parameter in self._owned:
            _set_added_flag(parameter)


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The gradient buffer that a framework keeps for this parameter, or None."""
    return getattr(parameter, "main_grad", None)


def has_main_grad_flags(parameter: Tensor) -> bool:
    """Whether a framework wants to know, or says, what W does with the `main_grad`."""
    return hasattr(parameter, "grad_added_to_main_grad") or hasattr(parameter, "overwrite_main_grad")


def overwrites(parameter: Tensor) -> bool:
    """Whether W writes this parameter's `main_grad` instead of adding to it.

    Raises RuntimeError where autograd accumulates a part of the gradient: it may be in the `main_grad` by now.
    """
    if not getattr(parameter, "overwrite_main_grad", False):
        return False
    if parameter in _partly_autograds:
        raise RuntimeError(
            f"overwrite_main_grad must be False for a weight, here {list(parameter.shape)}, of which autograd "
            "accumulates another part (a function that is not zbkern's takes it, too), which W would overwrite: zero "
            "its main_grad before the step instead"
        )
    return True


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Where gradients of this parameter accumulate: its `main_grad` if it has one, else its `.grad`."""
    main_grad = main_grad_of(parameter)
    return parameter.grad if main_grad is None else main_grad


def has_hooks(parameter: Tensor) -> bool:
    """True when this parameter has hooks that autograd runs as it accumulates the gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_hooks_on_node(parameter: Tensor) -> bool:
    """Whether the node by which autograd accumulates into this leaf has hooks, which a W that waits does not visit.
    torch tells of them where another one is registered."""
    with torch._C.DisableTorchFunction():  # no weight is read
        node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    for register in (node.register_hook, node.register_prehook):
        handle = register(print)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def has_hooks_or_main_grad(parameter: Tensor) -> bool:
    """True when autograd alone, accumulating in B, would run hooks too early or miss the `main_grad`."""
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks  # no calls: this runs per parameter in F
    return bool(hooks) or getattr(parameter, "main_grad", None) is not None


def empty_gradient(parameter: Tensor, kernel: WGradKernel | None = None) -> Tensor:
    """Memory for a gradient, in the dtype that the parameter takes: torch's `grad_dtype`, which only leaves have."""
    if kernel is not None and kernel.empty is not None:
        return kernel.empty(parameter)
    dtype = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def accumulate(batch: Sequence[list[WGradTask]]) -> None:
    """Runs W straight into the gradients: added in place where one exists, written where none does.

    batch: groups of tasks; those of a group have one weight, and several groups have a kernel that takes them all.
    """
    if len(batch) == 1:  # the usual case without a GradientTarget: 0.6 us less of about 8 us per small W
        group = batch[0]
        gradients = _existing_gradients(group[0].parameters)
        if gradients is not None:
            segments = [group[0].tensors] if len(group) == 1 else [task.tensors for task in group]
            group[0].kernel.run(segments, gradients, True)
            return
    wanted = [group for group in batch if _is_wanted(group[0].parameters)]
    targets = [GradientTarget(group[0]) for group in wanted]
    if wanted:
        run_into(wanted, targets)
    for target in targets:
        target.commit()


def _is_wanted(parameters: Sequence[Tensor | None]) -> bool:
    """Whether one takes a gradient; a task of none at all is wanted for what its kernel does by itself."""
    return not parameters or any(parameter is not None and parameter.requires_grad for parameter in parameters)


def _existing_gradients(parameters: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """The `.grad` of each, None for those that take none; None when one is not there to be added to in place."""
    gradients: list[Tensor | None] = []
    gradient = None
    for parameter in parameters:
        if parameter is None or not parameter.requires_grad:
            gradients.append(None)
            continue
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or hasattr(parameter, "main_grad"):
            return None
        gradients.append(gradient)
    return None if gradient is None else gradients


def run_into(batch: Sequence[list[WGradTask]], targets: Sequence[GradientTarget], **options: Any) -> None:
    """Runs every group into its target: several groups as one kernel for those that are written, one for the others.

    options: for kernels that take several weights; the others have none.
    """
    kernel = batch[0][0].kernel
    if kernel.run_many is None or (len(batch) == 1 and not options):
        target = targets[0]
        kernel.run([task.tensors for task in batch[0]], target.outputs, target.add)
        return
    for add in (False, True):  # what is written first: if the next one fails, nothing has been added twice
        layers = [
            ([task.tensors for task in group], target.outputs)
            for group, target in zip(batch, targets, strict=True)
            if target.add is add
        ]
        if layers:
            kernel.run_many(layers, add, **options)


_partly_autograds = WeakIdKeyDictionary()  # parameters of which autograd accumulates a part, whose use has no W


def note_part_of_autograd(parameter: Tensor) -> None:
    """In a backward of a parameter's W: autograd itself accumulates another part of its gradient."""
    _partly_autograds[parameter] = True


def _set_added_flag(parameter: Tensor) -> None:
    """Tells the framework that owns this parameter's `main_grad` that the gradient is in it, if it wants to know.

    Not where another part comes through autograd: the framework has to add that, in this backward or a later one.
    """
    if hasattr(parameter, "grad_added_to_main_grad"):
        parameter.grad_added_to_main_grad = parameter not in _partly_autograds


def sum_gradients(tasks: Sequence[WGradTask]) -> list[tuple[Tensor, Tensor]]:
    """(parameter, gradient) for every parameter of these tasks, summed over them; not in `.grad` or `.main_grad` yet.

    Where a parameter has a `main_grad` the sum is of its dtype: a sum in bf16 would be rounded before it is added.
    """
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    for task in tasks:
        params = [p for p in task.parameters if p is not None and p.requires_grad]
        if not params:
            continue
        add = any(id(parameter) in sums for parameter in params)
        for parameter in params:
            if id(parameter) not in sums:
                start = _empty_sum(parameter, task.kernel)
                sums[id(parameter)] = (parameter, start.zero_() if add else start)
        outputs = [None if p is None or id(p) not in sums else sums[id(p)][1] for p in task.parameters]
        task.kernel.run([task.tensors], outputs, add)
    return list(sums.values())


def _empty_sum(parameter: Tensor, kernel: WGradKernel) -> Tensor:
    main_grad = main_grad_of(parameter)
    if main_grad is None:
        return empty_gradient(parameter, kernel)
    overwrites(parameter)  # raises while the task still waits
    return torch.empty_like(parameter, dtype=main_grad.dtype, requires_grad=False)


def add_gradients(segments: Sequence[Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
    """outputs (+)= the sum of segments, which are gradients already."""
    for segment in segments:
        for output, gradient in zip(outputs, segment, strict=True):
            if output is not None:
                output.add_(gradient) if accumulate else output.copy_(gradient)
        accumulate = True


ADD_GRADIENTS = WGradKernel(add_gradients)


def accumulate_via_autograd(gradients: list[tuple[Tensor, Tensor]], create_graph: bool = False) -> None:
    """Gives gradients to leaf parameters through autograd's accumulation: every kind of hook runs as in a backward.

    A gradient whose parameter has a `main_grad` is added there first, and its hooks see zeros: they run when the
    gradient is ready, and whatever they add changes nothing. Empties the list, so that autograd may keep the tensors
    instead of copying them.
    """
    for parameter, gradient in gradients:
        main_grad = main_grad_of(parameter)
        if main_grad is not None:
            with torch.no_grad():
                main_grad.copy_(gradient) if overwrites(parameter) else main_grad.add_(gradient)
                gradient.zero_()
            _set_added_flag(parameter)
    parameters = [parameter for parameter, _ in gradients]
    gradient = None  # type: ignore[assignment]  # autograd copies a tensor to which there are other references
    with torch.enable_grad():
        injected = _InjectGradient.apply(gradients, *parameters)
    torch.autograd.backward(injected, create_graph=create_graph)


class _InjectGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to each parameter is the gradient at hand."""

    @staticmethod
    def forward(ctx: Any, gradients: list[tuple[Tensor, Tensor]], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [gradient for _, gradient in ctx.gradients]
        ctx.gradients.clear()
        return (None, *gradients)
