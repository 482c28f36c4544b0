"""Logits that nobody has computed yet: what the head was given, and what the model makes of what the head gives.

While a chunk's forward runs for a loss that takes them, a stand-in is in the place of the head. It notes the products
with numbers and the softcap that follow (Gemma, Cohere, Granite); for any other operation the logits are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zbkern import functional
from zbkern import nn as layers
from zbkern.data_parallel import frees_after_forward, is_sharded

Autocast = tuple[str, torch.dtype, bool]  # a device's kind, and what torch.autocast takes besides


class DeferredLogits:
    """softcap tanh(scale head(hidden) / softcap), and without a softcap scale head(hidden), not computed.

    hidden: [rows, length, features]. A loss of your own with `loss_traits(takes_deferred_logits=True)` gets these in
    the place of logits from a chunk of `cut` whose head is a linear one; where it is not, the loss gets logits.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: Any,
        autocast: Autocast,
        scale: float = 1.0,
        softcap: float | None = None,
        slices: Sequence[int] = (),
    ) -> None:
        self.hidden, self.head, self.autocast, self.scale, self.softcap = hidden, head, autocast, scale, softcap
        self.slices = tuple(slices)  # lengths, each of which the head is computed for by itself

    def _in_slices(self, slices: Sequence[int]) -> DeferredLogits:
        """The same computed in slices of these lengths, to the bits that a loss of each slice has of its tokens."""
        return DeferredLogits(self.hidden, self.head, self.autocast, self.scale, self.softcap, slices)

    def cross_entropy(self, labels: Tensor, reduction: str = "none", ignore_index: int = -100) -> Tensor:
        """Cross-entropy with labels [rows, length]: for "none" [rows, length], 0 where ignored; else a number."""
        impl = getattr(self.head, "zbkern_impl", "auto")
        if self.slices and reduction != "none":
            losses = self.cross_entropy(labels, "none", ignore_index)
            return losses.sum() if reduction == "sum" else losses.sum() / (labels != ignore_index).sum()
        return self._of_head(functional.linear_cross_entropy, labels, ignore_index, reduction=reduction, impl=impl)

    def log_probs(self, tokens: Tensor, ignore_index: int = -100) -> Tensor:
        """The logarithm of the probability of each of tokens [rows, length], in float32; 0 where ignored."""
        return -self.cross_entropy(tokens, ignore_index=ignore_index)

    def log_probs_and_entropy(self, tokens: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
        """The same, and the entropy of what each token was chosen from, of both of which a loss may be made."""
        return self._of_head(functional.linear_log_probs, tokens, ignore_index)

    def _of_head(self, function: Callable[..., Any], labels: Tensor, ignore_index: int, **how: Any) -> Any:
        """A function of zbkern.functional that computes the head with what follows."""
        options = functional.CrossEntropyOptions(ignore_index, softcap=self.softcap)

        def run(hidden: Tensor) -> Any:
            hidden = hidden if self.scale == 1 else hidden * self.scale
            if self.slices:
                parts = zip(hidden.split(self.slices, 1), labels.split(self.slices, 1), strict=True)
                return _side_by_side([of_tokens(*part) for part in parts])
            return of_tokens(hidden, labels)

        def of_tokens(hidden: Tensor, labels: Tensor) -> Any:
            return function(hidden, self.head.weight, labels, self.head.bias, options=options, name="head", **how)

        with torch.autocast(*self.autocast):
            if not is_sharded(self.head):
                return run(self.hidden)
            self.head.forward = run  # FSDP2 gathers the weight around a forward of the head
            try:
                return self.head(self.hidden)
            finally:
                del self.head.forward


def _side_by_side(results: Sequence[Any]) -> Any:
    """Tensors of slices, or tuples of such, as of the whole sequence."""
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts, 1) for parts in zip(*results, strict=True))
    return torch.cat([*results], 1)


def token_log_probs(logits: Tensor | DeferredLogits, tokens: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy) for the loss of a policy: the logarithm of the probability of each token, and the entropy of
    what it was chosen from.

    logits: [rows, length, vocabulary], or what a `loss_fn` that takes `DeferredLogits` gets. tokens: [rows,
    length], of each position the token that follows it, ignore_index where that does not count. Both results are
    [rows, length], have a gradient, and are 0 where ignored; in float32, or float64.
    """
    if isinstance(logits, DeferredLogits):
        return logits.log_probs_and_entropy(tokens, ignore_index)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    counts = tokens != ignore_index
    chosen = log_p.gather(-1, torch.where(counts, tokens, 0).unsqueeze(-1)).squeeze(-1)
    p = log_p.exp()
    entropy = -(p * torch.where(p > 0, log_p, 0)).sum(-1)  # a word that is masked out has none
    return torch.where(counts, chosen, 0), torch.where(counts, entropy, 0)


pytree.register_pytree_node(
    DeferredLogits,
    lambda logits: ([logits.hidden], (logits.head, logits.autocast, logits.scale, logits.softcap, logits.slices)),
    lambda leaves, context: DeferredLogits(*leaves, *context),
)


class Head:
    """The head of a model, if this chunk has it: while a forward runs for a loss that needs no logits, a stand-in is in
    its place, which gives some that are not computed. name: "" where another chunk has it."""

    def __init__(self, chunk: nn.Module, name: str) -> None:
        self.name, self.may_wait, self._chunk = name, False, chunk

    def begin(self, side: dict[str, Any], carry: Any) -> dict[str, Any]:
        if self.name and self.may_wait and _can_wait(self._chunk, self.name):
            self._put(_Head(self._chunk.get_submodule(self.name)))
        return side

    def end(self) -> None:
        if self.name and isinstance(stand_in := self._chunk.get_submodule(self.name), _Head):
            self._put(stand_in.head)

    def _put(self, module: nn.Module) -> None:
        parent, _, key = self.name.rpartition(".")
        self._chunk.get_submodule(parent)._modules[key] = module


def deferred(output: Any) -> Any:
    """What a chunk gives: noted logits as they are to be computed, or, where that is not known, computed."""
    return pytree.tree_map_only(_Noted, _Noted.result, output)


def _can_wait(chunk: nn.Module, name: str) -> bool:
    """Whether it is a linear layer and no more: in a plain dtype, on one rank, and nobody listens to what it gives."""
    head: Any = chunk.get_submodule(name)
    if type(head).forward not in (nn.Linear.forward, layers.Linear.forward) or "forward" in vars(head):
        return False
    hooks = (*head._forward_hooks.values(), *head._forward_pre_hooks.values(), *head._backward_hooks.values())
    if any(not getattr(hook, "__module__", "").startswith(_OWN_HOOKS) for hook in hooks):
        return False
    outer = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
    above = [module for module in map(chunk.get_submodule, [*outer, ""]) if is_sharded(module)]
    if is_sharded(head):
        return True
    return type(head.weight) is nn.Parameter and not (above and frees_after_forward(above[0]))


_OWN_HOOKS = ("zbkern.pipeline", "torch.distributed.fsdp")  # the others see what the head gives


class _Head(nn.Module):
    """In the place of a head."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.__dict__["head"] = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["head"], name)

    def forward(self, hidden: Tensor) -> Tensor:
        if type(hidden) is not Tensor:
            return self.head(hidden)
        like = hidden.new_empty(()).expand(*hidden.shape[:-1], self.head.out_features)
        kind = hidden.device.type
        autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return _Noted.made(like, (hidden, self.head, autocast), (), partial(self.head, hidden))


class _Noted(Tensor):
    """Logits in the forward of a model, which have a shape and a dtype, and no values.

    start: what `DeferredLogits` needs of the head. steps: (name of a function, number) that came since. compute: gives
    the logits; it has run where they are `computed`. later: what was made of them.
    """

    start: tuple[Tensor, nn.Module, Autocast]
    steps: tuple[tuple[str, float], ...]
    compute: Callable[[], Tensor]
    computed: Tensor | None
    later: list[_Noted]

    @staticmethod
    def made(like: Tensor, start: Any, steps: Any, compute: Callable[[], Tensor]) -> _Noted:
        noted = like.as_subclass(_Noted)
        noted.start, noted.steps, noted.compute, noted.computed, noted.later = start, steps, compute, None, []
        return noted

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        noted, others, kwargs = next(iter(args), None), args[1:], kwargs or {}
        if type(noted) is cls and noted.computed is None:
            with torch._C.DisableTorchFunctionSubclass():
                if function.__name__ in _ASKING and not isinstance(found := function(*args, **kwargs), Tensor):
                    return found
                if not kwargs and (step := _step(function.__name__, others)) is not None:
                    like = function(noted.new_empty(()), *others).expand(noted.shape)
                    if torch.promote_types(like.dtype, noted.dtype) is like.dtype:
                        steps = (*noted.steps, *step)
                        noted.later.append(
                            cls.made(like, noted.start, steps, lambda: function(noted.values(), *others))
                        )
                        return noted.later[-1]
        args, kwargs = pytree.tree_map_only(cls, cls.values, (tuple(args), kwargs))
        return function(*args, **kwargs)

    def values(self) -> Tensor:
        """The logits, which are computed once, and what was made of them before anything can be written into them."""
        if self.computed is None:
            self.computed = self.compute()
            for each in self.later:
                each.values()
        return self.computed

    def result(self) -> DeferredLogits | Tensor:
        """What the chunk gives for them."""
        names = [name for name, _ in self.steps]
        bend = names.index("tanh") if "tanh" in names else len(names)
        scale, softcap = _product(self.steps), _product(self.steps[bend:])
        biased = scale != 1 and self.start[1].bias is not None
        if self.computed is not None or names.count("tanh") > 1 or softcap <= 0 or biased:
            return self.values()
        return DeferredLogits(*self.start, scale, softcap if bend < len(names) else None)


_ASKING = frozenset(("__get__", "size", "dim", "__len__"))
_MULTIPLYING = frozenset(("mul", "multiply", "__mul__", "__rmul__"))
_DIVIDING = frozenset(("div", "divide", "true_divide", "__truediv__"))


def _step(name: str, others: Sequence[Any]) -> list[tuple[str, float]] | None:
    """What a function does to logits: it multiplies or divides them by a number, "tanh", nothing; else None."""
    if name in _MULTIPLYING | _DIVIDING and len(others) == 1 and type(others[0]) in (int, float):
        return [("divide" if name in _DIVIDING else "multiply", others[0])]
    casts = name in ("float", "contiguous") or (name == "to" and [*map(type, others)] == [torch.dtype])
    if casts and all(dtype.is_floating_point for dtype in others):
        return []
    return [("tanh", 1.0)] if name == "tanh" and not others else None


def _product(steps: Sequence[tuple[str, float]]) -> float:
    """Of the numbers; divided at the end, so that to divide and multiply by a softcap is 1."""
    factors, divisors = (math.prod(n for name, n in steps if (name == "divide") is each) for each in (False, True))
    return factors / divisors
