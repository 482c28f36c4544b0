"""Blocks in two halves, attention and MLP: which of its parts each half has is told by the block's own forward.

Parts are divided in the order in which they are called. With zeros from the parts of one half the forward must give
what the other half adds to its input: the forwards of both halves one after another are compared with that of the whole
block, bit for bit, and so are gradients, with a small random function in the place of every part. Parallel blocks, and
norms of the sum, fail that; weights and sizes do not matter to it. What the forward does besides its parts may be
nothing but the residual sum (`Residual`), in training and in evaluation.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from zbkern.pipeline.models.residual import Residual, WholeBlock
from zbkern.pipeline.models.stand_ins import Flow, Zeros, first_tensor
from zbkern.pipeline.transport.tensors import tensors_in

_SHAPE = 5, 4, 3  # more rows than outputs, so that a tensor is not taken for several
_MOST_OUTPUTS = 3
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_KNOWN_HOOKS = "zbkern.", "torch."  # of cut, and of `fully_shard`
_SETTINGS = bool | int | float | str | None  # which calls may differ by


class Halves(NamedTuple):
    """Names of the parts of both halves, and how many outputs each part has, 0 for a tensor that is no tuple."""

    parts: tuple[tuple[str, ...], tuple[str, ...]]
    outputs: dict[str, int]

    def parameters(self, block: nn.Module, half: int) -> int:
        return sum(p.numel() for name in self.parts[half] for p in block.get_submodule(name).parameters())


def halves_of(block: nn.Module) -> Halves:
    """The halves of a block, the second as small as can be. Raises WholeBlock with the reason where it has none."""
    parts = dict(block.named_children())
    if own := [name for name, tensor in (*block._parameters.items(), *block._buffers.items()) if tensor is not None]:
        raise WholeBlock(f"it has a tensor {own[0]!r} outside of its parts")
    _check_surroundings(block)
    outputs = dict.fromkeys(parts, 0)
    calls = _calls(block, outputs)
    for name in {name for name in calls if calls.count(name) > 1 and not parts[name].state_dict()}:
        del outputs[name]  # dropout, which both halves have
    order = [*dict.fromkeys(_calls(block, outputs))]
    if beside := [name for name, part in parts.items() if name not in order and part.state_dict()]:
        raise WholeBlock(f"its forward does not call {beside[0]!r}")
    wholes = {training: _run(block, outputs, _input(), training) for training in (True, False)}
    for end in reversed(range(1, len(order))):
        divided = tuple(order[:end]), tuple(order[end:])
        with suppress(Exception):
            if all(_are_halves(block, outputs, divided, training, whole) for training, whole in wholes.items()):
                return Halves(divided, outputs)
    raise WholeBlock("it has not attention and an MLP one after the other, each with a norm of its input alone")


class CallCheck:
    """Hook before a block in two chunks: raises ValueError for a call in which more would run twice, once a kind."""

    def __init__(self, name: str, halves: Halves) -> None:
        self._name, self._halves = name, halves
        self._known: set[Hashable] = set()

    def __call__(self, block: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # behind `around`
        kind = _kind_of_call(block, inputs, keywords)
        if kind in self._known:
            return
        try:
            check_call(block, self._halves, inputs, keywords)
        except WholeBlock as reason:
            raise ValueError(
                f"cut: {self._name!r}, of which this chunk has one half, must be in one chunk as a whole: {reason}"
            ) from reason
        self._known.add(kind)

    def around(self, block: nn.Module, call: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
        """The same around a call that is compiled."""
        self(block, inputs, keywords)
        return call(*inputs, **keywords)


def check_call(block: nn.Module, halves: Halves, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raises WholeBlock where a call with these arguments would do more outside of its parts; computes nothing."""
    _check_surroundings(block)
    inputs, keywords = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), (inputs, dict(keywords)))
    # checkpoints of activations count what is saved, and which operations run
    with saved_tensors_hooks(_same, _same), _disable_current_modes(), torch.inference_mode(False), torch.device("meta"):
        hidden = torch.empty_like(first_tensor(inputs, keywords), requires_grad=True) * 1
        _run(block, halves.outputs, hidden, block.training, *_with_first(inputs, keywords, hidden))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _kind_of_call(block: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Hashable:
    """Equal for calls that a forward may not tell apart by the kind of what it gets."""
    hooks = tuple(len(getattr(block, name)) for name in _HOOKS)
    return block.training, hooks, *map(_kind_of, inputs), *((name, _kind_of(v)) for name, v in keywords.items())


def _kind_of(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    return type(value), value if isinstance(value, _SETTINGS) else None


def _check_surroundings(block: nn.Module) -> None:
    """Raises WholeBlock for what runs around the forward, in both halves."""
    hooks = [hook for name in _HOOKS for hook in getattr(block, name).values()]
    for hook in hooks:
        function = getattr(hook, "func", hook)  # of a partial
        if not str(getattr(function, "__module__", "")).startswith(_KNOWN_HOOKS):
            name = getattr(function, "__qualname__", type(function).__name__)
            raise WholeBlock(f"it has a hook ({name}), which both halves would call")
    if "forward" in vars(block):
        raise WholeBlock("its forward was replaced on the module itself")


def _are_halves(block: nn.Module, outputs: dict[str, int], divided: Any, training: bool, whole: _Run) -> bool:
    first = _run(block, outputs, _input(), training, absent=divided[1])
    if torch.equal(first.output, whole.output) or torch.equal(first.output, first.hidden):
        return False  # all is in one of them
    both = _run(block, outputs, first.output, training, absent=divided[0])
    right, got = (
        torch.autograd.grad(end.output.sin().sum(), start.hidden, retain_graph=True)[0]
        for start, end in ((whole, whole), (first, both))
    )
    return torch.equal(both.output, whole.output) and torch.allclose(right, got, 1e-12, 1e-12)


def _calls(block: nn.Module, outputs: dict[str, int]) -> list[str]:
    """The names of parts as they are called. Finds how many outputs each has: one more for the part that the forward
    fails after."""
    while True:
        calls: list[str] = []
        try:
            _run(block, outputs, _input(), False, calls=calls)
            return calls
        except WholeBlock:
            raise
        except Exception as error:  # whatever a forward raises that needs more than its input
            if not calls or outputs.get(calls[-1], _MOST_OUTPUTS) == _MOST_OUTPUTS:
                raise WholeBlock(
                    f"its forward takes more than hidden states: {type(error).__name__}: {error}"
                ) from error
            outputs[calls[-1]] = max(2, outputs[calls[-1]] + 1)


class _Run(NamedTuple):
    hidden: Tensor
    output: Tensor


def _run(
    block: nn.Module,
    outputs: dict[str, int],
    hidden: Tensor,
    training: bool,
    inputs: Sequence[Any] | None = None,
    keywords: Mapping[str, Any] | None = None,
    *,
    absent: Sequence[str] = (),
    calls: list[str] | None = None,
) -> _Run:
    """What the block's forward makes of `hidden`, and of nothing else where no other inputs are given; the names of the
    parts go to `calls` as they are called. Raises WholeBlock for all that the forward does besides a residual sum."""
    residual = Residual(hidden)
    twin = _in_mode(block, training)
    twin.__dict__.update({name: {} for name in _HOOKS}, _compiled_call_impl=None)
    twin.__dict__["_modules"] = {
        name: part
        if part is None
        else _in_mode(part, training)
        if name not in outputs
        else _Part(part, name, outputs, residual, name in absent, [] if calls is None else calls)
        for name, part in block._modules.items()
    }
    if hasattr(twin, "gradient_checkpointing"):
        twin.__dict__["gradient_checkpointing"] = False
    if inputs is None or keywords is None:
        parameters = [*inspect.signature(twin.forward).parameters.values()][1:]
        unknown = {p.name: None for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        inputs, keywords = (hidden,), unknown
    before, drawn = _attributes(twin), _drawn_outside_of_torch()
    with torch.enable_grad(), torch.random.fork_rng([]):
        # dropout of what the parts give is the same in both halves; torch.manual_seed would change those of GPUs, too
        torch.default_generator.manual_seed(0)
        with residual:
            output = twin(*inputs, **keywords)
    if differ := [who for who, state in _drawn_outside_of_torch().items() if state != drawn.get(who)]:
        raise WholeBlock(f"its forward draws a random number of {differ[0]}'s, another one in each half")
    changed = [name for name, value in _attributes(twin).items() if name not in before or before[name] != value]
    if changed:
        raise WholeBlock(f"its forward sets its attribute {changed[0]!r}")
    first = output[0] if isinstance(output, tuple) else output
    if [*map(id, tensors_in(output))] != [id(first)]:
        raise WholeBlock("its forward returns other tensors beside the hidden states")
    residual.check_output(first)
    return _Run(hidden, first)


def _drawn_outside_of_torch() -> dict[str, Any]:
    """Which random numbers come next, by who draws them."""
    numpy = sys.modules.get("numpy.random")
    return {"Python": random.getstate(), **({} if numpy is None else {"NumPy": pickle.dumps(numpy.get_state())})}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What could tell that one was set, or that a container was changed."""
    return {
        name: [*map(id, value)] if isinstance(value, list | tuple | dict | set) else id(value)
        for name, value in vars(module).items()
    }


def _in_mode(module: nn.Module, training: bool) -> nn.Module:
    """A copy, whose containers are its own."""
    twin = copy.copy(module)
    twin.__dict__.update({name: copy.copy(v) for name, v in vars(module).items() if isinstance(v, list | dict | set)})
    twin.training = training
    return twin


def _input() -> Tensor:
    drawn = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.requires_grad_() * 1  # not a leaf, which could not be written in place


def _with_first(inputs: Sequence[Any], keywords: Mapping[str, Any], hidden: Tensor) -> tuple[Any, Any]:
    if inputs:
        return (hidden, *inputs[1:]), keywords
    name = next(name for name, value in keywords.items() if isinstance(value, Tensor))
    return inputs, {**keywords, name: hidden}


class _Part(Zeros):
    """In the place of a part: a function that no other part has, or nothing."""

    def __init__(
        self,
        original: nn.Module,
        name: str,
        outputs: dict[str, int],
        residual: Residual,
        is_absent: bool,
        calls: list[str],
    ) -> None:
        super().__init__(original, name, Flow(), outputs[name])
        self._place, self._residual, self._is_absent, self._calls = (
            1 + [*outputs].index(name),
            residual,
            is_absent,
            calls,
        )

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if not self._is_absent:
            self._calls.append(self._name)
        with torch._C.DisableTorchFunction():
            given = first_tensor(inputs, keywords)
            output = torch.zeros_like(given) if self._is_absent else torch.sin(self._place * given + self._place)
        self._residual.add_part(output)
        return self._shaped(output)
