"""Probes: what lets a chunk take its sequences in slices, or several of them packed into a row.

The inputs of a probe are the library's own (`probe_inputs.py`). What the chunk computes for a sequence, and the
gradients, are compared with those of its slices (`comparison.py`), and a pack's with those of each of its sequences. A
probe is made when a call of a new kind comes, in a new mode, and leaves no trace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from zbkern.pipeline.runtime.slices.carry import carries_of
from zbkern.pipeline.runtime.slices.comparison import Case, Comparison, Unable
from zbkern.pipeline.runtime.slices.probe_inputs import ROWS, Call, Draw, drawn_inputs, of_sequences, padding
from zbkern.pipeline.runtime.slices.sliced_batch import length_of, tells_ends
from zbkern.pipeline.transport.tensors import tensors_in

TOKENS = 19  # of a probe: slices of prime lengths, which divide few other sizes
_LARGEST = 512  # tokens of a slice, for what takes no others than those of the call
_Cases = Iterator[tuple[str, Case, bool]]  # each with what it is called, and whether slices keep attributes

logger = logging.getLogger("zbkern")


class Probes:
    """Of a chunk: the kinds of calls that it has been probed with."""

    def __init__(self, chunk: int, module: nn.Module) -> None:
        self._chunk, self._module, self._parts = chunk, module, [*module.modules()]
        # by kind: tokens of its probe, whether these were told apart, and why it is refused
        self._found: dict[object, tuple[int, bool, str | None]] = {}

    def before(self, run: Callable[..., Any], inputs: Any, side: Mapping[str, Any]) -> None:
        """Before run(inputs, side), which calls the module. Raises ValueError for sequences that are cut, or packed, in
        a way that the chunk cannot take."""
        carry, plain = side.get("carry"), {name: value for name, value in side.items() if name != "carry"}
        has_ends, positions = tells_ends(side), _packs_alone(inputs, side)
        if carry is None and positions is None and not has_ends:
            return
        tokens = length_of(inputs, plain) or 0
        call = Call(inputs, plain, tokens, tokens if carry is None else carry.total)
        refused = self._refused("packs", run, call, _difference_of_packs) if has_ends or positions is not None else None
        # positions that begin anew tell of packs, and may come in any later row
        if refused is not None and (has_ends or _begin_anew(positions, carry)):
            raise ValueError(f"Pipeline: chunk {self._chunk} cannot take sequences packed into a row: {refused}")
        if carry is None or carry.start > 0:
            return
        takes_packs = positions is not None and refused is None
        refused = self._refused("slices", run, call, partial(difference_of_slices, in_packs=takes_packs))
        if refused is not None:
            raise ValueError(f"Pipeline: chunk {self._chunk} cannot take its sequences in slices{refused}")

    def _refused(
        self, what: str, run: Callable[..., Any], call: Call, difference: Callable[..., str | None]
    ) -> str | None:
        """Why calls of this kind are refused; None where a probe has found nothing."""
        key = what, call.kind(), self._mode()
        count, (known, told, refused) = min(TOKENS, call.total), self._found.get(key, (1, True, None))
        is_known = count <= known or known < count < min(TOKENS, 2 * known)
        if is_known and (told or not call.tells_tokens_apart(self._module)):
            return refused
        start = time.perf_counter()
        refused = difference(self._module, run, call)
        self._found[key] = count, refused is not None or call.tells_tokens_apart(self._module), refused
        logger.info("chunk %d: a probe of %s took %.2f s", self._chunk, what, time.perf_counter() - start)
        return refused

    def _mode(self) -> object:
        """Which parts are in training, and which weights are trained."""
        trained = [
            each is not None and each.requires_grad for part in self._parts for each in part._parameters.values()
        ]
        return torch.is_grad_enabled(), (*(part.training for part in self._parts),), (*trained,)


def kind_of_probes(is_sliced: bool, inputs: Any, side: Mapping[str, Any], tokens: int | None) -> object:
    """What tells which probes a microbatch may have: ranks whose passes are collective must make the same."""
    names = sorted({*side, *(inputs if isinstance(inputs, dict) else ())})
    if not is_sliced and not tells_ends(side) and "position_ids" not in names:
        return None
    return is_sliced, names, min(TOKENS, tokens or length_of(inputs, side) or 0)


def difference_of_slices(
    module: nn.Module, run: Callable[..., Any], call: Call, own: Sequence[int] = (), in_packs: bool = False
) -> str | None:
    """What is different for the slices of a sequence; None for nothing. own: the lengths of slices in tokens that are
    compared, too. in_packs: rows of sequences, too, where positions alone tell of them."""

    def cases(pair: Sequence[Sequence[int]], draw: Draw) -> _Cases:
        for number, lengths in enumerate([*pair, own] if own else pair):
            count, rows = sum(lengths), min(call.rows, ROWS)
            for what, counted, sequences in _variants(call, number, lengths, rows, in_packs):
                inputs, side = drawn_inputs(call, module, count, draw, counted, sequences)
                side = {**side, **(of_sequences(call, sequences or [count], True) if tells_ends(call.side) else {})}
                # because of what is beside it for all tokens, a module may take a few as the first slice of a sequence
                wholes = {"carry": None}, {"carry": carries_of([count])[0]}
                if counted is not None:
                    counted = counted.to(_device_of(call, module))
                yield what, Case(inputs, side, lengths, wholes, None, counted), number == 1

    failure: tuple[str, Unable] | None = None
    for pair, draw in _attempts(call):
        failure, wrong = _first_difference(module, run, call, cases(pair, draw))
        if wrong is not None:
            return (
                f"{wrong[0]}: {wrong[1]} than for whole ones. It must get what comes before a slice from the carry "
                "(zbkern.nn.Attention takes it; docs/long_context.md); or use a schedule without slices"
            )
        if failure is None:
            return None
    assert failure is not None
    what, error = failure
    if error.in_parts:
        return f": where it can take whole ones, a slice{what} raises {error}; use a schedule without slices"
    return (
        f"{what}: they cannot be compared with whole ones ({error}), which a probe does with tokens of its own; use a "
        "schedule without slices (docs/long_context.md)"
    )


def _difference_of_packs(module: nn.Module, run: Callable[..., Any], call: Call) -> str | None:
    """What is different for sequences that are packed into a row; None for nothing."""

    def cases(pair: Sequence[Sequence[int]], draw: Draw, told: bool) -> _Cases:
        for lengths in pair:
            inputs, side = drawn_inputs(call, module, sum(lengths), draw)
            parts = [of_sequences(call, [length], told) for length in lengths]
            yield "", Case(inputs, side, lengths, [of_sequences(call, lengths, True)], parts), False

    if call.total < 2:
        return None
    failure: tuple[str, Unable] | None = None
    for (pair, draw), told in product(_attempts(call), (False, True)):
        failure, wrong = _first_difference(module, run, call, cases(pair, draw, told))
        if wrong is not None:
            return (
                f"{wrong[1]} than for each by itself. It must get where they end (zbkern.nn.Attention takes "
                "cu_seqlens; docs/batches.md); or plan batches with packs=False"
            )
        if failure is None:
            return None
    assert failure is not None
    return f"they cannot be compared with each by itself ({failure[1]}); plan batches with packs=False"


def _first_difference(
    module: nn.Module, run: Callable[..., Any], call: Call, cases: _Cases
) -> tuple[tuple[str, Unable] | None, tuple[str, str] | None]:
    """Why a case could not be compared, or what differs in it; each with the case's name."""
    comparison = Comparison(module, run, _device_of(call, module))
    with comparison.running():
        for what, case, keeps_attributes in cases:
            try:
                wrong = comparison.difference(case, keeps_attributes)
                if wrong is not None and case.has_sums:
                    wrong = comparison.difference(case._replace(divides=True), keeps_attributes)
            except Unable as error:
                return (what, error), None
            if wrong is not None:
                return None, (what, wrong)
    return None, None


def _attempts(call: Call) -> Iterator[tuple[Sequence[Sequence[int]], Draw]]:
    """Lengths of parts, two times, and how inputs are drawn: the next where these cannot be compared."""
    count = min(TOKENS, call.total)
    first, few = max(1, count * 7 // TOKENS), min(13, count)
    uneven = [first, 1, count - first - 1] if count > 2 else [1, 1]
    half = -(-few * 3 // 5)
    yield [uneven, [half, few - half]], Draw()
    yield [uneven, [half, few - half]], Draw(resampled=True, shrinks=True)
    length = min(call.tokens, _LARGEST)
    yield [[length, min(length, max(1, call.total - length))]] * 2, Draw(resampled=True)


def _variants(
    call: Call, number: int, lengths: Sequence[int], rows: int, in_packs: bool
) -> Iterator[tuple[str, Tensor | None, Sequence[int]]]:
    """What may come in any batch where it can: names, what is no padding, and lengths of sequences in a row.

    number: of the lengths, which differ.
    """
    count = sum(lengths)
    packed = [count // 4, 1, count - count // 4 - 1] if count > 4 else []
    if tells_ends(call.side):
        yield "", None, packed
    elif call.has_mask():
        if number == 0:
            padded = padding(max(rows, 2), count, lengths[0])
            for each in [padded[:rows]] if rows > 1 else padded.split(1):
                yield " with padding (attention_mask)", each, ()
        else:
            yield "", torch.ones(rows, count, dtype=torch.bool), ()
    else:
        yield "", None, ()
        if in_packs and number == 1:
            yield " of packed rows (position_ids)", None, packed


def _packs_alone(inputs: Any, side: Mapping[str, Any]) -> Tensor | None:
    """Positions that alone may tell of sequences in a row; under a mask they are those of padded rows."""
    given = {**(inputs if isinstance(inputs, dict) else {}), **side}
    positions, tokens = given.get("position_ids"), length_of(inputs, side)
    is_theirs = isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == tokens
    return positions if is_theirs and given.get("attention_mask") is None else None


def _begin_anew(positions: Tensor | None, carry: Any) -> bool:
    """Whether a sequence begins within a row, or with a later slice of it."""
    if positions is None:
        return False
    anew = bool((positions[:, 1:] <= positions[:, :-1]).any())
    return anew or (carry is not None and carry.start > 0 and bool((positions[:, 0] == 0).any()))


def _device_of(call: Call, module: nn.Module) -> torch.device:
    tensors = [*tensors_in((call.inputs, dict(call.side))), *module.parameters()]
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
