"""The comparison that a chunk's first forward in slices makes by itself: a few tokens whole, and in two slices; and
that of its first pack: a few tokens of two sequences in one row, and each by itself.

Every part of the chunk is compared, and then goes on with what it has returned for the whole: rounding does not add up
from part to part, and the part that needs whole sequences is named.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.forward_state import ForwardState, evaluation_mode, random_state
from zbkern.pipeline.runtime.slices.carry import carries_of
from zbkern.pipeline.runtime.slices.sliced_batch import ENDS, OWN_ENDS, cut, length_of
from zbkern.pipeline.transport.tensors import local_part, tensors_in, wait_for

_TOKENS = 32  # at most
_EXACT, _EXACT_TF32, _EXACT_16_BITS, _EXACT_8_BITS = 1e-3, 5e-3, 3e-2, 0.25  # relative
_OF_8_BITS = {"torchao", "transformer_engine"}
_LONGEST = {"max_length_q", "max_length_k"}
_stance = threading.Lock()  # torch has one for all threads

# side inputs of all tokens, of which the first that a module takes count, and of both parts
_Sides = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]

logger = logging.getLogger("zbkern")


def compare_in_slices(
    chunk: int, module: nn.Module, call: Callable[..., Any], inputs: Any, side: Mapping[str, Any]
) -> str | None:
    """Compares what a chunk returns, without gradients; random numbers and buffers are left as they were.

    call: of the module, with inputs and side inputs, here those of a slice, its carry among them. Raises ValueError
    naming the first part whose outputs differ. Returns what slices raised, where whole sequences did not. Where nothing
    can be compared, a warning says why.
    """
    few, count = _few((inputs, {**side, "carry": None}), side["carry"].end - side["carry"].start)
    lengths = _halves(count)

    def sides() -> _Sides:
        # because of what is beside it for all tokens, a module may take a few as the first slice of a sequence alone
        wholes: list[dict[str, Any]] = [{"carry": None}, {"carry": carries_of([count])[0]}]
        return wholes, [{"carry": each} for each in carries_of(lengths)]

    comparison = _Comparison(module, call, few, lengths)
    raised = failure = None
    with comparison.running():
        for what, others, counted in _batches(few, count):
            failure = comparison.failure(sides, others, counted)
            if failure is not None and comparison.in_parts:
                raised = raised or f"a slice{what} raises {failure}"
            if wrong := comparison.first_that_differs():
                raise ValueError(
                    f"Pipeline: chunk {chunk} cannot take its sequences in slices{what}: {wrong} than for whole "
                    "ones. It must get what comes before a slice from the carry (zbkern.nn.Attention takes it; "
                    "docs/long_context.md); or use a schedule without slices"
                )
    if failure is not None:
        logger.warning("chunk %d: slices could not be compared with whole sequences: %s", chunk, failure)
    return raised


def compare_in_packs(
    chunk: int, module: nn.Module, call: Callable[..., Any], inputs: Any, side: Mapping[str, Any]
) -> None:
    """Compares two sequences packed into one row with each by itself. Side inputs tell where sequences end."""
    few, count = _few((inputs, dict(side)), length_of(inputs, side) or 0)
    if count < 2:
        return
    lengths = _halves(count)
    comparison = _Comparison(module, call, few, lengths)
    with comparison.running():
        failure = comparison.failure(
            lambda: ([_of_sequences(few, lengths)], [_of_sequences(few, [length]) for length in lengths])
        )
        if wrong := comparison.first_that_differs():
            raise ValueError(
                f"Pipeline: chunk {chunk} cannot take sequences packed into a row: {wrong} than for each by itself. It "
                "must get where they end (zbkern.nn.Attention takes cu_seqlens; docs/batches.md); or plan batches "
                "with packs=False"
            )
    if failure is not None:
        logger.warning("chunk %d: packed sequences could not be compared with each by itself: %s", chunk, failure)


def _few(arguments: Any, tokens: int) -> tuple[Any, int]:
    """At most so many tokens of a slice or row, which has `tokens`, and their number; a single one twice."""
    count = min(_TOKENS, tokens)

    def few(leaf: Tensor) -> Tensor:
        leaf = leaf.detach()
        if leaf.dim() < 2 or leaf.shape[1] != tokens:
            return leaf
        return leaf.repeat_interleave(2, 1) if tokens == 1 else leaf[:, :count]

    return pytree.tree_map_only(Tensor, few, arguments), max(2, count) if tokens else 0


def _halves(count: int) -> list[int]:
    return [(count + 1) // 2, count // 2]


def _by_name(arguments: Any) -> dict[str, Any]:
    inputs, side = arguments
    return {**(inputs if isinstance(inputs, dict) else {}), **side}


def _of_sequences(arguments: Any, lengths: Sequence[int]) -> dict[str, Any]:
    """The inputs and side inputs that tell of sequences, for sequences of these lengths in a row.

    Those of the transformers library that tell of packs are left out for a single sequence.
    """
    sides: dict[str, Any] = {}
    for name, value in _by_name(arguments).items():
        if name == "position_ids" and isinstance(value, Tensor):
            positions = torch.cat([torch.arange(length) for length in lengths])
            sides[name] = positions.to(value).expand(*value.shape[:-1], len(positions))
        elif name == OWN_ENDS or (name in ENDS and len(lengths) > 1):
            sides[name] = torch.as_tensor(value).new_tensor([*accumulate(lengths, initial=0)])
        elif name in _LONGEST and len(lengths) > 1:
            sides[name] = max(lengths)
    return sides


def _batches(few: Any, count: int) -> Iterator[tuple[str, dict[str, Tensor], Tensor | None]]:
    """The batches that are compared: what each is called, arguments to replace, and which tokens count.

    Padding and packed rows may come in any batch where they can, so that they are put in here. What is computed for
    padding need not be the same.
    """
    integers = {
        name: leaf for name, leaf in _by_name(few).items() if isinstance(leaf, Tensor) and not leaf.is_floating_point()
    }
    mask, positions = (integers.get(name) for name in ("attention_mask", "position_ids"))
    if mask is not None and mask.shape[1:] == (count,):
        for first, last in (2, count - 2), (count // 2 + 1, count):
            padded = torch.zeros_like(mask)
            padded[:, first:last] = 1
            yield " with padding (attention_mask)", {"attention_mask": padded}, padded.bool()
    elif positions is not None and positions.shape[1:] == (count,):
        begin = torch.arange(count, device=positions.device)
        packed = torch.where(begin > count // 4, begin - count // 4 - 1, begin).expand_as(positions)
        yield " of packed rows (position_ids)", {"position_ids": packed}, None
    yield "", {} if mask is None else {"attention_mask": torch.ones_like(mask)}, None


class _Key(NamedTuple):
    """Names a tensor that a part is given, or returns: by the part's call, and its place among the leaves."""

    part: str
    call: int
    place: int
    is_input: bool


class _Comparison:
    """What the parts of a module return for a few tokens, and how far from it they are for two parts of these.

    call: of the module, with inputs and side inputs such as `few`. lengths: of the parts, in tokens.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any], few: Any, lengths: Sequence[int]) -> None:
        self.in_parts = False
        self._module, self._call, self._few = module, call, few
        self._tokens = sum(lengths)
        self._places = [*pairwise(accumulate(lengths, initial=0))]
        device = next(tensor.device for tensor in [*tensors_in(few), *module.parameters()])
        self._before = ForwardState([module], device)
        self._place = (0, self._tokens)
        self._counted: Tensor | None = None  # [rows, tokens], those that are no padding; None for all
        self._whole: dict[_Key, Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._errors: list[tuple[_Key, Tensor]] = []
        self._bytes = min((each.element_size() for each in module.parameters() if each.is_floating_point()), default=8)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, forwards are watched and have no graph; at the end buffers and random numbers are as they were."""
        parts = [*self._module.named_modules()]
        hooks = [part.register_forward_hook(self._hook(name)) for name, part in parts]
        try:
            with torch.no_grad(), _eagerly(self._module):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._before.restore()
            torch.clear_autocast_cache()  # of casts without a graph

    def failure(
        self, sides: Callable[[], _Sides], others: Mapping[str, Tensor] | None = None, counted: Tensor | None = None
    ) -> str | None:
        """Runs the forwards; why they cannot be compared, or None. others: in the place of arguments of these names."""
        self._counted = counted
        try:
            if not self._run(sides(), others or {}):  # dropout, say
                with evaluation_mode([self._module]):
                    if not self._run(sides(), others or {}):
                        return "its forward draws random numbers"
        except Exception as error:  # the forward itself will raise it, or takes no few tokens
            return f"{type(error).__name__}: {error}"
        return None

    def _run(self, sides: _Sides, others: Mapping[str, Tensor]) -> bool:
        """Whether they drew no random numbers."""
        self._before.restore()
        drawn = random_state(self._before.device)
        wholes, parts = sides
        self.in_parts = False
        for number, side in enumerate(wholes):
            self._whole.clear()
            self._errors.clear()
            try:
                self._forward((0, self._tokens), {**others, **side})
                break
            except Exception:
                if number + 1 == len(wholes):
                    raise
                self._before.restore()
        if not _are_same(drawn, random_state(self._before.device)):
            return False
        self._before.restore()
        self.in_parts = True
        for place, side in zip(self._places, parts, strict=True):
            self._forward(place, {**others, **side})
        return True

    def _forward(self, place: tuple[int, int], others: Mapping[str, Any]) -> None:
        """Runs the tokens of a place: its first one, and the one after its last."""
        self._place = place
        self._calls.clear()
        (inputs, side), others = cut((self._few, dict(others)), self._tokens, place)
        side = {name: value for name, value in side.items() if name not in {*ENDS, *_LONGEST}}
        if isinstance(inputs, dict):
            inputs, others = (
                {n: others.get(n, v) for n, v in inputs.items()},
                {n: v for n, v in others.items() if n not in inputs},
            )
        self._call(inputs, {**side, **others})

    def first_that_differs(self) -> str | None:
        """The part that first computed something else, and by how much."""
        exact = self._exact()
        wrong = [(key, float(error)) for key, error in self._errors if not error <= exact]
        for key, error in wrong:
            if not key.is_input:
                # its inputs are something else, so that it is not the one: that was computed around it
                before = any(other[:2] == key[:2] and other.is_input for other, _ in wrong)
                name = key.part.rpartition(".")[0] if before else key.part
                kind = type(self._module.get_submodule(name)).__name__
                how = "NaN" if math.isnan(error) else f"by {error:.1%}"
                return f"{name or 'it'} ({kind}) computes something else, {how},"
        return None

    def _exact(self) -> float:
        """How much rounding may leave in a part."""
        kinds = {kind.__module__.partition(".")[0] for part in self._module.modules() for kind in type(part).__mro__}
        if kinds & _OF_8_BITS:
            return _EXACT_8_BITS
        if self._bytes <= 2:
            return _EXACT_16_BITS
        return _EXACT if torch.get_float32_matmul_precision() == "highest" else _EXACT_TF32

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(part: nn.Module, inputs: Any, output: Any) -> Any:
            call = self._calls[name]
            self._calls[name] += 1
            for at, leaf in enumerate(pytree.tree_leaves(inputs)):
                self._seen(_Key(name, call, at, True), leaf)
            leaves, structure = pytree.tree_flatten(output)
            seen = [self._seen(_Key(name, call, at, False), leaf) for at, leaf in enumerate(leaves)]
            changed = any(one is not other for one, other in zip(seen, leaves, strict=True))
            return pytree.tree_unflatten(seen, structure) if changed else None

        return hook

    def _seen(self, key: _Key, leaf: Any) -> Any:
        """Keeps what is returned for the whole, and gives it in the place of what is returned for a slice."""
        tensor = local_part(wait_for(leaf))
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.dim() < 2 or not tensor.numel():
            return leaf
        self._bytes = min(self._bytes, tensor.element_size())
        if not self.in_parts:
            if tensor.shape[1] == self._tokens:
                self._whole[key] = tensor.clone()
            return leaf
        whole, place = self._whole.get(key), slice(*self._place)
        if whole is None or whole[:, place].shape != tensor.shape:
            return leaf
        sizes, off = _sizes(whole), _sizes(torch.where(whole[:, place] == tensor, 0, whole[:, place] - tensor))
        off = off.masked_fill(whole[:, place].isnan().unsqueeze(-1).flatten(2).any(2), 0)
        if self._counted is not None:
            if sizes.shape != self._counted.shape:
                return leaf
            off = off.masked_fill(~self._counted[:, place] & ~off.isnan(), 0)  # a gradient of zero times NaN is NaN
        error = off / sizes[:, place].clamp_min(sizes.nanmedian()).clamp_min(torch.finfo(sizes.dtype).tiny)
        self._errors.append((key, torch.where(off == 0, 0, error).max()))  # also where both are NaN
        return torch.empty_like(tensor).copy_(whole[:, place]) if type(leaf) is Tensor else leaf


def _sizes(tensor: Tensor) -> Tensor:
    """The largest absolute value of each row and token."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.abs().unsqueeze(-1).flatten(2).amax(2)


def _are_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether no random number was drawn between these states."""
    pairs = [(one[name], other[name]) for name in one]
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@contextmanager
def _eagerly(module: nn.Module) -> Iterator[None]:
    """Inside, nothing is compiled: hooks of parts run, and no code is made for a few tokens."""
    if all(part._compiled_call_impl is None and "_orig_mod" not in part._modules for part in module.modules()):
        yield
        return
    with _stance, torch.compiler.set_stance("force_eager"):
        yield
