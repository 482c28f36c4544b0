"""Sequences in slices on two CPU processes, next to whole ones, in one interleaved run: time of a step and peak memory.

A decoder of width 512, four blocks of attention (8 heads, 2 of keys and values) and MLP, on sequences of 4096 tokens;
gloo, one thread per rank. The plans are made with costs that are measured first. Peak memory is of one more step: on
each rank the most bytes of tensors that were there at once, above those before the step, without what an operation has
inside. Every contestant's loss and gradients are compared with plain backward() first. Last, what slicing costs by
itself: one rank, 8 slices against 1. The last line is of the fastest in slices within 0.6 of 1F1B's peak memory.

    python -m bench.slices [--tokens 4096] [--microbatches 2] [--rounds 3] [--effort 2] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zbkern
from bench import ranks
from bench.report import add_out, write_json
from zbkern import functional
from zbkern.pipeline import Costs, Pipeline, ProfileOptions, Schedule, plan, profile, schedules, simulate
from zbkern.planning.costs.equal_slices import equal_times
from zbkern.reporting import environment, machine_line, markdown_table

RANKS, BLOCKS, WIDTH, HEADS, KV_HEADS = 2, 4, 512, 8, 2
SLICES, ALONE = (4, 6, 8, 12), 8
LOSS = nn.MSELoss(reduction="sum")  # of each slice by itself
MEMORY = 0.6  # of what 1F1B needs, which plans with slices may use
OF_BLOCKS = (  # costs that grow with the number of blocks in a chunk
    "forward",
    "backward",
    "weight",
    "activation",
    "held",
    "attention_forward",
    "attention_backward",
    "carried",
)


class Attention(nn.Module):
    """Grouped-query attention; in slices, keys and values of those before come from the carry."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.kv, self.out = (nn.Linear(WIDTH, n) for n in (WIDTH, 2 * KV_HEADS * size, WIDTH))

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        q, kv = (each(x).unflatten(-1, (-1, WIDTH // HEADS)) for each in (self.q, self.kv))
        if carry is not None:
            kv = carry.append(self, kv, 1)
        return self.out(functional.attention(q, *kv.chunk(2, 2), causal=True).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        x = x + self.attention(self.norms[0](x), carry)
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Blocks(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        for block in self.blocks:
            x = block(x, carry)
        return x


class Allocated(TorchDispatchMode):
    """Bytes of the storages that operations make inside, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        found = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and (key := leaf.untyped_storage()._cdata) not in given | self._known:
                self._known.add(key)
                self._count(leaf.untyped_storage().nbytes())
                weakref.finalize(leaf.untyped_storage(), self._free, key, leaf.untyped_storage().nbytes())
        return found

    def _count(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


class Contestant:
    """A schedule with this rank's copies of its blocks, by their index."""

    def __init__(self, name: str, schedule: Schedule, model: Blocks, x: Tensor, y: Tensor) -> None:
        self.name, self.schedule = name, schedule
        chunks = own_chunks(schedule.placement, model)
        self.blocks = {index: block for found in chunks.values() for index, block in found.items()}
        modules = [Blocks([*found.values()]) for found in chunks.values()]
        self.pipe = Pipeline(modules, schedule, LOSS)
        self.batch = (x if 0 in chunks else None, y if len(schedule.placement) - 1 in chunks else None)

    def step(self) -> Tensor | None:
        return self.pipe.step(*self.batch)

    def check(self, model: Blocks, expected: Tensor) -> None:
        """Raises where loss or gradients are not those of plain backward()."""
        loss = self.step()
        if loss is not None:
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        for index, block in self.blocks.items():
            for (name, ours), plain in zip(block.named_parameters(), model.blocks[index].parameters(), strict=True):
                assert ours.grad is not None
                assert plain.grad is not None
                error = (ours.grad - plain.grad).abs().max() / plain.grad.abs().max()
                assert error < 1e-4, f"{self.name} {index}.{name}: off by {error:.1e}"
                ours.grad = None

    def peak(self) -> int:
        """Bytes of tensors that a step had at most on this rank, above those before it."""
        with Allocated() as found:
            self.step()
        return found.most


def own_chunks(placement: Sequence[int], model: Blocks) -> dict[int, dict[int, nn.Module]]:
    """This rank's chunks, each its converted copies of blocks by their index."""
    size = BLOCKS // len(placement)
    mine = [chunk for chunk, rank in enumerate(placement) if rank == (dist.get_rank() if len({*placement}) > 1 else 0)]
    return {
        chunk: {
            index: zbkern.convert(copy.deepcopy(model.blocks[index]))
            for index in range(chunk * size, (chunk + 1) * size)
        }
        for chunk in mine
    }


def measured(model: Blocks, x: Tensor, y: Tensor) -> Costs:
    """Costs of one block, those of all being alike."""
    placement = (*range(RANKS), *reversed(range(RANKS)))
    modules = [Blocks([*found.values()]) for found in own_chunks(placement, model).values()]
    options = ProfileOptions(repeats=2, slices=True)
    found = profile(modules, placement, LOSS, x[:1], y[:1], 1, options=options)
    flat = found.per_chunk(len(placement))
    means = {name: statistics.mean(getattr(flat, name)) for name in OF_BLOCKS}
    return Costs(
        **means, overhead=statistics.mean(flat.overhead), tokens=found.tokens, time_unit="ms", memory_unit="bytes"
    )


def of_blocks(costs: Costs, count: int) -> Costs:
    """Costs of a chunk with so many."""
    return replace(costs, **{name: count * getattr(costs, name) for name in OF_BLOCKS})


def our_schedules(costs: Costs, m: int, effort: int) -> list[tuple[str, Schedule, Costs]]:
    """1F1B first; whole sequences, then in slices: name, schedule, costs of its chunks."""
    single, in_v = of_blocks(costs, BLOCKS // RANKS), of_blocks(costs, BLOCKS // RANKS // 2)
    found = [
        ("one_f_one_b", schedules.one_f_one_b(RANKS, m), single),
        ("zb_h2", schedules.zb_h2(RANKS, m), single),
        ("zb_v", schedules.zb_v(RANKS, m), in_v),
        ("plan", plan(single, RANKS, m, effort=effort).schedule, single),
        ("plan in a V", plan(in_v, RANKS, m, 2, "v", effort=effort).schedule, in_v),
    ]
    limit = MEMORY * max(simulate(found[0][1], single).peak_memory)
    lengths = {number: equal_times(single.per_chunk(RANKS), number, costs.tokens) for number in SLICES}
    for name, shown, of_chunks in (
        ("one_f_one_b", "Seq1F1B", single),
        ("zb_h1", "zb_h1", single),
        ("zb_v", "zb_v", in_v),
    ):
        found.append((f"{shown}, 8 slices", getattr(schedules, name)(RANKS, m, slices=lengths[8]), of_chunks))
    planned = plan(in_v, RANKS, m, 2, "v", effort=effort, slices=lengths[8]).schedule
    found.append(("plan in a V, 8 slices", planned, in_v))
    for number, slices in lengths.items():
        planned = plan(in_v, RANKS, m, 2, "v", limit, effort=effort, slices=slices).schedule
        found.append((f"plan in a V, {number} slices, in {MEMORY} of the memory", planned, in_v))
    return found


def run(tokens: int, m: int, rounds: int, effort: int) -> dict[str, Any]:
    """On every rank: name -> seconds of every round, peak bytes of each rank, number of slices."""
    torch.manual_seed(0)
    model = Blocks([Block() for _ in range(BLOCKS)])
    x, y = torch.randn(m, tokens, WIDTH), torch.randn(m, tokens, WIDTH)
    expected = torch.stack([LOSS(model(x[i : i + 1]), y[i : i + 1]) for i in range(m)]).mean()
    expected.backward()
    costs = measured(model, x, y)
    ours = our_schedules(costs, m, effort)
    predicted = {name: simulate(schedule, of_chunks).cost for name, schedule, of_chunks in ours}
    contestants = [Contestant(name, schedule, model, x, y) for name, schedule, _ in ours]
    for contestant in contestants:
        contestant.check(model, expected.detach())
    times: dict[str, list[float]] = {each.name: [] for each in contestants}
    for done in range(rounds):
        for contestant in contestants:
            dist.barrier()
            start = time.perf_counter()
            contestant.step()
            dist.barrier()
            times[contestant.name].append(time.perf_counter() - start)
        if dist.get_rank() == 0 and sys.stderr.isatty():
            print(f"\rround {done + 1} of {rounds}", end="", file=sys.stderr)
    figures = {}
    for contestant in contestants:
        peaks: list[Any] = [None] * RANKS
        dist.all_gather_object(peaks, contestant.peak())
        slices = len(contestant.schedule.slices)
        figures[contestant.name] = {
            "seconds": times[contestant.name],
            "predicted_ms": predicted[contestant.name],
            "peak_bytes": peaks,
            "slices": slices,
        }
        contestant.pipe.close()
    return figures


def alone(tokens: int, m: int, rounds: int) -> list[list[float]]:
    """Seconds of one rank, with whole sequences and with slices."""
    torch.manual_seed(0)
    model = Blocks([Block() for _ in range(BLOCKS)])
    x, y = torch.randn(m, tokens, WIDTH), torch.randn(m, tokens, WIDTH)
    both = [Contestant("", schedules.zb_h1(1, m, slices=slices), model, x, y) for slices in (1, ALONE)]
    times: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for contestant, found in zip(both, times, strict=True):
            start = time.perf_counter()
            contestant.step()
            if number > 0:  # the first warms up
                found.append(time.perf_counter() - start)
    for contestant in both:
        contestant.pipe.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--effort", type=int, default=2, help="of the plans")
    add_out(parser)
    arguments = parser.parse_args()
    tokens, m, rounds = arguments.tokens, arguments.microbatches, arguments.rounds
    figures = ranks.run(RANKS, run, tokens, m, rounds, arguments.effort)
    base = figures["one_f_one_b"]
    whole = min((each for each in figures.values() if each["slices"] == 1), key=median_of)
    sliced = [each for each in figures.values() if each["slices"] > 1]
    best = min((each for each in sliced if peak(each) <= MEMORY * peak(base)), key=median_of, default=None)
    best = best or min(sliced, key=peak)
    rows = [
        (
            name,
            f"{median_of(each):.2f} s",
            f"{ratio(each, base):.3f}",
            f"{each['predicted_ms'] / base['predicted_ms']:.3f}",
            f"{peak(each) / 1e6:.0f} MB",
            f"{peak(each) / peak(base):.2f}",
        )
        for name, each in sorted(figures.items(), key=lambda item: median_of(item[1]))
    ]
    print(f"\n{m} sequences of {tokens} tokens on {RANKS} ranks; gradients equal plain backward()\n")
    print(markdown_table(("schedule", "step", "of 1F1B", "predicted", "peak", "of 1F1B's"), rows), flush=True)
    one, many = ranks.run(1, alone, tokens, m, rounds)
    cost = statistics.median(b / a for a, b in zip(one, many, strict=True))
    print(f"\nslicing alone, one rank, {ALONE} slices against 1: {cost:.3f} of the time")
    figures["alone"] = {"whole": one, "sliced": many}
    print(f"{machine_line(environment())}\n{write_json('slices', figures, arguments.out)}")
    print(
        f"sliced/1F1B {ratio(best, base):.2f} sliced/unsliced {ratio(best, whole):.2f} "
        f"peak/1F1B {peak(best) / peak(base):.2f}"
    )


def median_of(figures: dict[str, Any]) -> float:
    return statistics.median(figures["seconds"])


def peak(figures: dict[str, Any]) -> int:
    """Bytes, of the rank that has most."""
    return max(figures["peak_bytes"])


def ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    return statistics.median(a / b for a, b in zip(one["seconds"], other["seconds"], strict=True))


if __name__ == "__main__":
    main()
