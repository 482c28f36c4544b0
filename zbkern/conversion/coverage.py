"""How much of a model's weight gradient is deferred, and which parameters have theirs in B."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbkern.ops import autograd
from zbkern.wgrad import WGradQueue


class Coverage(NamedTuple):
    """How much of a model's weight gradient is deferred; as a string, one line.

    share: of all elements of parameters with two or more dimensions that get a gradient, those whose W is deferred.
    not_deferred: {name: its share} of the parameters whose gradient B computes, or a part of it, the largest first.
    """

    share: float
    not_deferred: dict[str, float]

    def __str__(self) -> str:
        line = f"{100 * self.share:.1f}% of the weight gradient is deferred"
        if not self.not_deferred:
            return line
        named = [f"{name} ({100 * share:.1f}%)" for name, share in self.not_deferred.items()]
        rest = f" and {len(named) - 5} more" if len(named) > 5 else ""
        return f"{line}; computed in B: {', '.join(named[:5])}{rest}"


def coverage(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Coverage:
    """Measures how much of the weight gradient of a converted model is deferred, by one forward and B.

    loss: computes a loss of the model, a tensor of one element, as in `lambda: model(**batch).loss`. Parameters of one
    dimension are left out: their gradients cost next to nothing. Gradients and random numbers are left as they were;
    buffers that a forward updates are not. For a model that is not wrapped (DistributedDataParallel, FSDP2) yet.
    Raises ValueError where no such parameter gets a gradient.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.dim() >= 2}
    before = [(p, p.grad) for p in model.parameters()]
    devices = {p.device for p in matrices.values() if p.device.type == "cuda"}
    queue = WGradQueue()
    try:
        for parameter, _ in before:
            parameter.grad = None
        with torch.random.fork_rng(list(devices)), torch.enable_grad(), queue.defer():
            value = loss()
            multiplied = _multiplied(value.grad_fn)
            value.backward()
        tasks = queue.tasks()
        waiting = {id(parameter) for task in tasks for parameter in task.parameters}
        added = multiplied | {id(p) for task in tasks if task.kernel.adds for p in task.parameters}
        not_deferred = {name: p.numel() for name, p in matrices.items() if p.grad is not None or id(p) in added}
        total = sum(p.numel() for name, p in matrices.items() if name in not_deferred or id(p) in waiting)
    finally:
        queue.discard()
        for parameter, gradient in before:
            parameter.grad = gradient
    if not total:
        raise ValueError("coverage: loss must depend on parameters of model with two or more dimensions; it does not")
    shares = {name: size / total for name, size in sorted(not_deferred.items(), key=lambda item: -item[1])}
    return Coverage(1 - sum(not_deferred.values()) / total, shares)


_PRODUCTS = re.compile("(m|M)(m|v)Backward|(L|l)inearBackward|Convolution|Rnn|Embedding|Attention|Cdist|Dot|Product")


def _multiplied(root: Any) -> set[int]:
    """By id, the parameters of which alone an operand of a product was made, in the graph from `root`: as values that
    wait (`ViewValue`), whose gradient is computed in B."""
    alone: dict[Any, set[int]] = {}  # by node: the parameters of which alone its result was made
    multiplied: set[int] = set()
    stack = [] if root is None else [root]
    while stack:
        node = stack.pop()
        inputs = [function for function, _ in node.next_functions if function not in (None, autograd.ANCHOR)]
        if waiting := [function for function in inputs if function not in alone]:
            stack += [node, *waiting]
        elif node.name() == "ViewValueBackward":
            alone[node] = {*map(id, node.call.params)}
        else:
            parameters = [alone[function] for function in inputs]
            alone[node] = set().union(*parameters) if all(parameters) else set()
            if _PRODUCTS.search(node.name()):
                multiplied.update(*parameters)
    return multiplied
