"""Probes: what lets a chunk take its sequences in slices, or several of them packed into a row.

The inputs of a probe are the library's own (`probe_inputs.py`). What the chunk computes for a sequence, and the
gradients, are compared with those of its slices (`comparison.py`), and a pack's with those of each of its sequences. A
probe is made when a call of a new kind comes, in a new mode, and leaves no trace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zbkern.pipeline.runtime.slices.carry import carries_of
from zbkern.pipeline.runtime.slices.case import Case, Fault, Unable
from zbkern.pipeline.runtime.slices.comparison import Comparison
from zbkern.pipeline.runtime.slices.probe_inputs import (
    LONGEST,
    ROWS,
    Call,
    Draw,
    drawn_inputs,
    has_other_numbers,
    kind_of,
    of_sequences,
    padding,
)
from zbkern.pipeline.runtime.slices.sliced_batch import length_of, tells_ends
from zbkern.pipeline.runtime.slices.traits import Traits
from zbkern.pipeline.transport.tensors import tensors_in

_TOKENS = 19  # of a probe: slices of prime lengths, which divide few other sizes
MOST_TOKENS = 64  # of its longer sequence: on a CPU as long as a few, for reading weights is what takes time
_DRAWS = 4  # more, where one may hide by chance what tokens are chosen by
_DDP = nn.parallel.DistributedDataParallel
_LARGEST = 512  # tokens of a slice, for what takes no others than those of the call
_Cases = Callable[[Comparison], Iterator[tuple[str, Case]]]  # to be compared by this, each with what it is called

logger = logging.getLogger("zbkern")


class Probes:
    """Of a chunk: the kinds of calls that it has been probed with."""

    def __init__(self, chunk: int, module: nn.Module) -> None:
        self._chunk, self._module = chunk, module
        self._is_collective = _is_collective(module)
        self._traits = Traits(module, self._is_collective)
        # by kind: tokens of its probe, whether these were told apart, and why it is refused
        self._found: dict[object, tuple[int, bool, str | None]] = {}

    def begin(self) -> None:
        """Before the forwards of a step: parts may have changed since those of the last one."""
        self._traits.begin()

    def check(self, run: Callable[..., Any], inputs: Any, side: Mapping[str, Any]) -> None:
        """Behind run(inputs, side), which calls the module. Raises ValueError for sequences that are cut, or packed, in
        a way that the chunk cannot take, Fault where no probe could tell."""
        if not side and not isinstance(inputs, dict):
            return
        carry, plain = side.get("carry"), {name: value for name, value in side.items() if name != "carry"}
        has_ends, positions = tells_ends(side), _packs_alone(inputs, side)
        if carry is None and positions is None and not has_ends:
            return
        tokens = length_of(inputs, plain) or 0
        call = Call(inputs, plain, tokens, tokens if carry is None else carry._total)
        refused = self._refused("packs", run, call, _difference_of_packs) if has_ends or positions is not None else None
        # positions that begin anew tell of packs, and may come in any later row
        if refused is not None and (has_ends or _begin_anew(positions, carry)):
            raise ValueError(f"Pipeline: chunk {self._chunk} cannot take sequences packed into a row: {refused}")
        # of segments that begin with a slice, only a later one may have numbers
        if carry is None or (carry.start > 0 and not has_other_numbers(call.by_name().get("attention_mask"))):
            return
        takes_packs = positions is not None and refused is None
        refused = self._refused("slices", run, call, partial(difference_of_slices, in_packs=takes_packs))
        if refused is not None:
            raise ValueError(f"Pipeline: chunk {self._chunk} cannot take its sequences in slices{refused}")

    def explain(self, error: Exception, run: Callable[..., Any], inputs: Any, side: Mapping[str, Any]) -> None:
        """Behind run(inputs, side) that has raised this: raises what `check` does, where a probe may tell more.

        None is made where other ranks, which have not failed, would have to make it, too.
        """
        if not self._is_collective and not isinstance(error, torch.OutOfMemoryError):
            try:
                with suppress(Fault):
                    self.check(run, inputs, side)
            except ValueError as refusal:
                raise refusal from error

    def _refused(
        self, what: str, run: Callable[..., Any], call: Call, difference: Callable[..., str | None]
    ) -> str | None:
        """Why calls of this kind are refused; None where a probe has found nothing."""
        key = what, call.kind(), self._mode()
        count, (known, told, refused) = min(MOST_TOKENS, call.total), self._found.get(key, (1, True, None))
        if count <= known and (told or not call.tells_tokens_apart(self._module)):
            return refused
        start = time.perf_counter()
        refused = difference(self._module, run, call)
        self._found[key] = count, refused is not None or call.tells_tokens_apart(self._module), refused
        logger.info("chunk %d: a probe of %s took %.2f s", self._chunk, what, time.perf_counter() - start)
        return refused

    def _mode(self) -> object:
        """What a module may ask for that is no argument: modes of torch, and what parts are between steps."""
        casts = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
        return torch.is_grad_enabled(), *casts, self._traits.of_parts()


def _is_collective(module: nn.Module) -> bool:
    """Whether passes may communicate with other ranks."""
    sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    parts = (isinstance(part, _DDP) or getattr(part, "collective_forward", False) for part in module.modules())
    return sharded or any(parts)


def kind_of_probes(is_sliced: bool, inputs: Any, side: Mapping[str, Any], tokens: int | None) -> object:
    """What tells which probes a unit may have: ranks whose passes are collective must make the same."""
    named = {**(inputs if isinstance(inputs, dict) else {}), **side}
    if not is_sliced and not tells_ends(side) and "position_ids" not in named:
        return None
    names = sorted((name, kind_of(value)) for name, value in named.items() if name not in LONGEST)
    return (
        is_sliced,
        names,
        has_other_numbers(named.get("attention_mask")),
        min(MOST_TOKENS, tokens or length_of(inputs, side) or 0),
    )


def difference_of_slices(
    module: nn.Module, run: Callable[..., Any], call: Call, own: Sequence[int] = (), in_packs: bool = False
) -> str | None:
    """What is different for the slices of a sequence; None for nothing. own: the lengths of slices in tokens that are
    compared, too. in_packs: rows of sequences, too, where positions alone tell of them."""

    failure: tuple[str, Unable] | None = None
    for lengths, draw in _attempts(call):
        cases = partial(_cases_of_slices, module, call, lengths, draw, own, in_packs)
        failure, wrong = _first_difference(module, run, call, cases)
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
        remedy = "use a schedule without slices"  # which the carry's own errors name
        return (
            f": where it can take whole ones, a slice{what} raises {str(error).removesuffix(f'; {remedy}')}; {remedy}"
        )
    return (
        f"{what}: they cannot be compared with whole ones ({error}), which a probe does with tokens of its own; use a "
        "schedule without slices (docs/long_context.md)"
    )


def _difference_of_packs(module: nn.Module, run: Callable[..., Any], call: Call) -> str | None:
    """What is different for sequences that are packed into a row; None for nothing."""

    def cases(lengths: _Lengths, draw: Draw, told: bool, comparison: Comparison) -> Iterator[tuple[str, Case]]:
        def case(each: Sequence[int], trains: bool, number: int = 0, rows: int = ROWS) -> Case:
            own = draw._replace(recurs=trains, number=number, rows=rows)
            inputs, side = drawn_inputs(call, module, sum(each), own)
            parts = [of_sequences(call, [length], told, rows) for length in each]
            whole = of_sequences(call, each, True, rows)
            return Case(inputs, side, each, [whole], parts, trains=trains, alike=not trains and not number)

        yield "", case(lengths.many, False)
        if _may_end_with_a_row(module, call, comparison):
            yield "", case(lengths.many, False, rows=1)
        yield "", case(lengths.uneven, True)
        for number in _more_draws(lengths, comparison):
            yield "", case(lengths.uneven, False, number)

    if call.total < 2:
        return None
    failure: tuple[str, Unable] | None = None
    for (lengths, draw), told in product(_attempts(call), (False, True)):
        failure, wrong = _first_difference(module, run, call, partial(cases, lengths, draw, told))
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
    """Why a case could not be compared, or what differs in it; each with the case's name. Raises Fault for what is
    neither."""
    try:
        comparison = Comparison(module, run, _device_of(call, module))
        with comparison.running():
            for what, case in cases(comparison):
                try:
                    wrong = _difference_of_choices(comparison, case) if case.alike else _difference(comparison, case)
                except Unable as error:
                    return (what, error), None
                if wrong is not None:
                    return None, (what, wrong)
    except (Fault, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise Fault(error) from error
    return None, None


def _difference(comparison: Comparison, case: Case) -> str | None:
    wrong = comparison.difference(case)
    return comparison.difference(case._replace(divides=True)) if wrong is not None and case.has_sums else wrong


def _difference_of_choices(comparison: Comparison, case: Case) -> str | None:
    """What differs where all tokens are chosen alike, in one way or another; as the data chooses where the module takes
    no such choice."""
    try:
        wrong = _difference(comparison, case)
    except Unable:
        comparison.chooses = True  # or might
        return _difference(comparison, case._replace(alike=False))
    if not comparison.compares:
        return wrong
    for passes in (sum(case.lengths), case.lengths[0], 0):
        with suppress(Unable):
            wrong = wrong or _difference(comparison, case._replace(passes=passes))
    return wrong


class _Lengths(NamedTuple):
    """Of the parts of sequences of a probe: three and two, two and three of a longer one, and more in a longer row."""

    uneven: Sequence[int]
    two: Sequence[int]
    longer: Sequence[int]
    in_three: Sequence[int]
    many: Sequence[int]


def _attempts(call: Call) -> Iterator[tuple[_Lengths, Draw]]:
    """Lengths of parts, and how inputs are drawn: the next where these cannot be compared."""
    count = min(_TOKENS, call.total)
    uneven = in_three = _in_three(count, count * 7 // _TOKENS)
    two = longer = many = _in_two(min(13, count))
    if (most := min(MOST_TOKENS, call.total)) > _TOKENS:
        longer, in_three = _in_two(most), _in_three(most, most * 7 // 12)
        # no sequence is longer than those of the other row
        many = [min(uneven[2], most - start) for start in range(0, most, uneven[2])]
    yield _Lengths(uneven, two, longer, in_three, many), Draw()
    yield _Lengths(uneven, two, longer, in_three, many), Draw(resampled=True, shrinks=True)
    length = min(call.tokens, _LARGEST)
    own = [length, min(length, max(1, call.total - length))]
    yield _Lengths(own, own, own, own, own), Draw(resampled=True)


def _in_three(count: int, first: int) -> list[int]:
    first = _prime(max(1, min(first, count - 2)))
    return [first, 1, count - first - 1] if count > 2 else [1, 1]


def _in_two(count: int) -> list[int]:
    first = _prime(min(-(-count * 3 // 5), max(1, count - 1)))
    return [first, count - first]


def _prime(most: int) -> int:
    """The largest one up to this, or 1: blocks of a few tokens do not end with so many."""
    return next(number for number in range(most, 0, -1) if all(number % each for each in range(2, number)))


def _cases_of_slices(
    module: nn.Module,
    call: Call,
    lengths: _Lengths,
    draw: Draw,
    own: Sequence[int],
    in_packs: bool,
    comparison: Comparison,
) -> Iterator[tuple[str, Case]]:
    """Some tell of gradients, too, and of attributes that slices leave to each other; in others tokens are chosen
    alike. These are of another length, by which a module may do something else. What has no mask and chooses nothing
    has only those of gradients, of the longer sequence."""
    has_ends = tells_ends(call.side)
    is_plain = not has_ends and not call.has_mask()
    cases = partial(_cases_of_lengths, module, call)
    if is_plain:
        yield "", _case_of_slices(module, call, lengths.longer, draw, False)._replace(may_end=True)
    else:
        yield from cases(lengths.two if has_ends else lengths.longer, draw, False)
    if _may_end_with_a_row(module, call, comparison):
        yield from cases(lengths.longer, draw._replace(rows=1), False)
    graded = lengths.uneven if comparison.chooses or not is_plain else lengths.in_three
    yield from cases(graded, draw, True, pads=True)
    if own:
        yield from cases(own, draw, True)
    for number in _more_draws(lengths, comparison):
        yield from cases(lengths.uneven, draw._replace(number=number), False)
    if in_packs and not has_ends and not call.has_mask():
        packed = _packed(sum(lengths.two))
        yield " of packed rows (position_ids)", _case_of_slices(module, call, lengths.two, draw, True, None, packed)


def _may_end_with_a_row(module: nn.Module, call: Call, comparison: Comparison) -> bool:
    """Whether tokens that are chosen alike up to a limit over all rows may be whole rows, and the same in all parts.
    Ranks whose passes are collective may have other numbers of rows, and make the same probe."""
    return comparison.chooses and (call.rows > 1 or _is_collective(module))


def _more_draws(lengths: _Lengths, comparison: Comparison) -> range:
    """Numbers of draws that are compared as the data chooses, forwards alone: where numbers are compared, where tokens
    are ordered or chosen, and for few tokens where anything is."""
    hides = comparison.compares or comparison.orders or (comparison.chooses and sum(lengths.uneven) < _TOKENS)
    return range(1, 1 + _DRAWS if hides else 1)


def _cases_of_lengths(
    module: nn.Module, call: Call, lengths: Sequence[int], draw: Draw, trains: bool, pads: bool = False
) -> Iterator[tuple[str, Case]]:
    """pads: with padding, where the call has a mask."""
    if pads and _is_collective(module):
        draw = draw._replace(rows=1)  # for other ranks may have one
    count, rows = sum(lengths), min(call.rows, draw.rows)
    case = partial(_case_of_slices, module, call, lengths, draw, trains)
    if tells_ends(call.side):
        yield "", case(sequences=_packed(count))
    elif not call.has_mask():
        yield "", case()
    elif pads:
        padded = padding(max(rows, 2), count, lengths[0])
        for counted in [padded[:rows]] if rows > 1 else padded.split(1):
            yield " with padding (attention_mask)", case(counted)
    else:
        yield "", case(torch.ones(rows, count, dtype=torch.bool))


def _case_of_slices(
    module: nn.Module,
    call: Call,
    lengths: Sequence[int],
    draw: Draw,
    trains: bool,
    counted: Tensor | None = None,
    sequences: Sequence[int] = (),
) -> Case:
    """counted: what is no padding. sequences: their lengths in a row."""
    count = sum(lengths)
    inputs, side = drawn_inputs(call, module, count, draw._replace(recurs=trains), counted, sequences)
    side = {**side, **(of_sequences(call, sequences or [count], True) if tells_ends(call.side) else {})}
    # because of what is beside it for all tokens, a module may take a few as the first slice of a sequence
    wholes = {"carry": None}, {"carry": carries_of([count])[0]}
    counted = None if counted is None else counted.to(_device_of(call, module))
    alike = not trains and not draw.number
    return Case(inputs, side, lengths, wholes, None, counted, trains, keeps_attributes=trains, alike=alike)


def _packed(count: int) -> list[int]:
    """Lengths of sequences in a row."""
    return [count // 4, 1, count - count // 4 - 1] if count > 4 else []


def _packs_alone(inputs: Any, side: Mapping[str, Any]) -> Tensor | None:
    """Positions that alone may tell of sequences in a row; under a mask they are those of padded rows."""
    given = {**(inputs if isinstance(inputs, dict) else {}), **side}
    positions = given.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or given.get("attention_mask") is not None:
        return None
    return positions if positions.shape[1] == length_of(inputs, side) else None


def _begin_anew(positions: Tensor | None, carry: Any) -> bool:
    """Whether a sequence begins within a row, or with a later slice of it."""
    if positions is None:
        return False
    anew = bool((positions[:, 1:] <= positions[:, :-1]).any())
    return anew or (carry is not None and carry.start > 0 and bool((positions[:, 0] == 0).any()))


def _device_of(call: Call, module: nn.Module) -> torch.device:
    tensors = [*tensors_in((call.inputs, dict(call.side))), *module.parameters()]
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
