"""Every order of a tiny problem's passes, and what it takes: by a simulation of a few lines, which knows nothing of the
library's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from zbkern.pipeline import Costs

Pass = tuple[str, int, int]  # kind, chunk, unit


def orders(chunks: list[int], backward: list[int], slices: int = 1, ordered: bool = True) -> Iterator[list[Pass]]:
    """Every order of one rank's passes; backward: the microbatches of its B as they go by. ordered: those of a chunk
    pass in order, as the slices of a sequence have to."""
    every = [(kind, chunk, unit) for kind in "FBW" for chunk in chunks for unit in range(len(backward))]

    def before(kind: str, chunk: int, unit: int) -> list[Pass]:
        if kind == "F":
            found = [("F", other, unit) for other in chunks if other < chunk]
            return found + ([("F", chunk, unit - 1)] if ordered and unit else [])
        last = unit // slices * slices + slices - 1
        found = [("F", chunk, last)] if kind == "B" else [("B", chunk, unit)]
        if kind == "B":
            found += [("B", other, unit) for other in chunks if other > chunk]
        place = backward.index(unit)
        return found + ([(kind, chunk, backward[place - 1])] if ordered and place else [])

    def extend(row: list[Pass]) -> Iterator[list[Pass]]:
        if len(row) == len(every):
            yield row
        for each in every:
            if each not in row and all(need in row for need in before(*each)):
                yield from extend([*row, each])

    yield from extend([])


class Slices:
    """Times and memory of every slice, by hand; of one slice, those of the sequence."""

    def __init__(self, costs: Costs, lengths: list[int]) -> None:
        ends = [end / sum(lengths) for end in accumulate(lengths, initial=0)]
        self.costs, self.count = costs, len(lengths)
        self.shares = [b - a for a, b in pairwise(ends)]
        self.contexts = [b * b - a * a for a, b in pairwise(ends)]

    def length(self, kind: str, unit: int) -> float:
        share, context = self.shares[unit % self.count], self.contexts[unit % self.count]
        whole, attention = {
            "F": (self.costs.forward, self.costs.attention_forward),
            "B": (self.costs.backward, self.costs.attention_backward),
            "W": (self.costs.weight, 0.0),
        }[kind]
        return self.costs.overhead + (whole - attention - self.costs.overhead) * share + attention * context

    def change(self, kind: str, unit: int) -> float:
        place = unit % self.count
        share, carried = self.shares[place], self.costs.carried
        if kind == "F":
            return (self.costs.activation - carried) * share + carried * (place == 0)
        if kind == "W":
            return -self.costs.held * share
        left = self.costs.held * share - (self.costs.activation - carried) * share
        gradients = carried if self.costs.carried_gradients is None else self.costs.carried_gradients
        return left + gradients * (place == self.count - 1) - (carried + gradients) * (place == 0)

    def peak(self, row: list[Pass]) -> float:
        return max(accumulate(self.change(kind, unit) for kind, _, unit in row))


def span(rows: tuple[list[Pass], ...], owners: list[int], given: Slices, makespan: bool) -> float:
    """The cost of the rows, or their makespan; infinite when they lock up."""
    ends: dict[Pass, float] = {}
    clock, first, place = [0.0] * len(rows), [0.0] * len(rows), [0] * len(rows)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while place[rank] < len(row):
                kind, chunk, unit = row[place[rank]]
                source = chunk + {"F": -1, "B": 1, "W": len(owners)}[kind]
                begin = clock[rank]
                if 0 <= source < len(owners):
                    if (kind, source, unit) not in ends:
                        break
                    lag = given.costs.communication * given.shares[unit % given.count]
                    begin = max(begin, ends[kind, source, unit] + (lag if owners[source] != rank else 0.0))
                if place[rank] == 0:
                    first[rank] = 0.0 if makespan else begin
                clock[rank] = ends[kind, chunk, unit] = begin + given.length(kind, unit)
                place[rank] += 1
                progress = True
    if any(done < len(row) for done, row in zip(place, rows, strict=True)):
        return float("inf")
    return max(end - begin for end, begin in zip(clock, first, strict=True))
