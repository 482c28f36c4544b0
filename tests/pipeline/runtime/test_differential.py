"""Gradients: random models, schedules and options in a pipeline against one process with plain torch, in float64.

To be read first: it draws every option of a Pipeline and of its Optimizer. Other files hold what it cannot see: errors,
when something runs, and what is in memory. Slow runs have other seeds than the quick ones: see
`tests/support/seeds.py`.
"""

from __future__ import annotations

import copy
import functools
import random
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.plain_training import gradient_of, one_process, state_of
from tests.support.random_chunks import READS, Chunk, Hooked
from tests.support.random_training import LOSSES, Case, Step, pieces
from tests.support.seeds import seed
from zbkern.pipeline import Optimizer, Pipeline, PipelineError, Schedule, checkpoint
from zbkern.pipeline.runtime.memory import host_copies
from zbkern.pipeline.transport.local import LocalTransport


def flat_gradients(chunks: list[Chunk]) -> Tensor:
    """A buffer for them, in which each has a view."""
    parameters = [p for p in nn.ModuleList(chunks).parameters() if p.requires_grad]
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.main_grad = part.view(parameter.shape)
    return buffer


def pipelined(case: Case, chunks: list[Chunk]) -> list[Any]:
    """The same on ranks that are threads, and after a checkpoint on others."""
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in range(len(case.parts)):
            if part:
                chunks = scrambled(chunks)
            found += of_part(case, chunks, part, folder)
    return found


def scrambled(chunks: list[Chunk]) -> list[Chunk]:
    """Copies with other values, for a checkpoint to bring them back."""
    again = copy.deepcopy(nn.ModuleList(chunks))
    for tensor in [*again.parameters(), *again.buffers()]:
        tensor.data += 1
    for piece in pieces([*again], Hooked):
        piece.add_hooks()
    torch.manual_seed(0)
    random.seed(0)
    return [*again]


def rename(chunk: int, key: str) -> str:
    return f"{chunk}.{key}"


def of_part(case: Case, chunks: list[Chunk], part: int, folder: str) -> list[Any]:
    steps, own = case.parts[part], case.rules[part]
    first = steps[0].schedule
    rule = own if own is None or part else own(4)  # a published schedule is its own rule
    copies = {first.placement[chunk]: copy.deepcopy(chunks[chunk].tied) for chunk in case.tied}  # one on each rank
    for chunk in case.tied:
        chunks[chunk].tied = copies[first.placement[chunk]]
    for chunk in chunks:
        zbkern.convert(chunk)

    def run(transport: LocalTransport) -> list[Any]:
        numbers = first.chunks_of(transport.rank)
        mine = [chunks[chunk] for chunk in numbers]
        found: list[Any] = []
        buffer = flat_gradients(mine) if case.flat else torch.zeros(0)
        make = functools.partial(
            Pipeline, mine, rule or first, LOSSES[case.loss], fill=case.fill, timeout=60, options=case.options
        )
        with ExitStack() as opened:
            pipe = opened.enter_context(make(transport))
            other = others[1][transport.rank]
            pipes = [pipe, opened.enter_context(make(other))] if case.other == "before" else [pipe]
            pipe.queue.merge = case.merge
            optimizer = optimizer_of(case, pipe, mine)
            pipes += [opened.enter_context(make(other))] if case.other == "after" else []
            if part:
                assert checkpoint.load(folder, pipe, optimizer, rename=rename) == (part, {"part": part})
            for step in steps:
                if transport.rank == 0:
                    case.change(chunks, step)
                meeting.wait(60)
                schedule = step.schedule if rule is None else None
                if step.fails:
                    fail(pipes[step.pipes[1]], step.fails, *batch_for(case, step, first, transport.rank), schedule)
                if step.zeroes:
                    nn.ModuleList(mine).zero_grad()
                    buffer.zero_()
                batch = batch_for(case, step, first, transport.rank)
                running = pipes[step.pipes[0]]
                loss = running.step(*batch, schedule=schedule)
                check_ran(case, running, step.schedule)
                losses = [known(running.gather(None if loss is None else loss.item()))]
                losses += [running.last.auxiliary_losses().get("penalty", 0.0)]
                inputs = batch[0] if isinstance(batch[0], list) else [batch[0]]
                of_inputs = gradient_of(inputs) if case.asks and transport.rank == 0 else None
                case.poison(chunks, step, {*numbers})
                before = copy.deepcopy(optimizer.state_dict()) if step.after == "load state" else {}
                if optimizer is not None:
                    optimizer.step()
                seen = of_reader(step, mine, transport.rank, meeting)
                read = after(step, schedule, pipes[step.pipes[1]], optimizer, before, batch, others[0][transport.rank])
                is_final = optimizer is None or step.after != "nothing"
                meeting.wait(60)
                assert seen is None or torch.equal(seen, flat(nn.ModuleList(mine).parameters()))
                if transport.rank == 0:
                    state = state_of(case, chunks) if is_final else []
                    found.append([*map(torch.tensor, losses), of_inputs, *read, *state])
                meeting.wait(60)
            views = [p for p in nn.ModuleList(mine).parameters() if hasattr(p, "main_grad")]
            assert all(p.grad is None and p.main_grad._base is buffer for p in views)
            if part + 1 < len(case.parts):
                checkpoint.save(folder, part + 1, pipe, optimizer, {"part": part + 1}, rename=rename)
        return found

    others, meeting = [LocalTransport.ring(first.ranks) for _ in range(2)], threading.Barrier(first.ranks)
    wait = random.Random(part)
    return results_on_threads(first.ranks, run, (lambda *_: wait.choice([0, 0.001, 0.01])) if case.late else None)[0]


def fail(pipe: Pipeline, fails: tuple[int, int], *batch: Any) -> None:
    """A step in which a forward raises: all ranks hear of it, and go on."""
    left = [fails[1]]

    def count(*_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise ArithmeticError("the cause")

    modules = [pipe.modules[fails[0]]] if fails[0] in pipe.modules else []
    hooks = [module.register_forward_pre_hook(count) for module in modules]
    with pytest.raises(PipelineError, match=r"action \d+F\d+: ArithmeticError: the cause"):
        pipe.step(*batch[:3], schedule=batch[3])
    for hook in hooks:
        hook.remove()


def of_reader(step: Step, chunks: list[Chunk], rank: int, meeting: threading.Barrier) -> Tensor | None:
    """What somebody reads who knows nothing of an Optimizer, while ranks that do not read only wait."""
    seen = None
    if step.after in READS and step.reader in (None, rank):
        seen = flat(READS[step.after](nn.ModuleList(chunks)))
    if step.after in READS:
        meeting.wait(60)
    return seen


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(tensor.detach().flatten() for tensor in tensors)])


def optimizer_of(case: Case, pipe: Pipeline, chunks: list[Chunk]) -> Optimizer | None:
    given: list[Any] = case.optimizers([*nn.ModuleList(chunks).parameters()])
    if not given:
        return None
    if pipe.rank == case.hooked:
        given[0].register_step_post_hook(lambda *_: None)
    limit = {"max_norm": case.limits[0]}
    if case.optimizer == "two with norms of their own":
        given, limit = [*zip(given, case.limits, strict=True)], {}
    return Optimizer(given if len(given) > 1 else given[0], pipe, undo=case.undo, adaptive=case.adaptive, **limit)


def batch_for(case: Case, step: Step, first: Schedule, rank: int) -> tuple[Any, Any, Any]:
    inputs, targets, side = (list(each) for each in zip(*step.batch, strict=True))
    inputs = [x.clone().requires_grad_(case.asks) for x in inputs]
    if step.given == "tensors":
        whole = {name: torch.cat([each[name] for each in side]) for name in side[0]}
        target = pytree.tree_map(lambda *each: torch.cat(each), *targets)
        return torch.cat(inputs).detach().requires_grad_(case.asks), target, whole or None
    given = (inputs, targets, side if any(side) else None)
    if step.given == "lists":
        return given
    return (inputs if rank == first.placement[0] else None, targets if rank == first.placement[-1] else None, given[2])


def check_ran(case: Case, pipe: Pipeline, schedule: Schedule) -> None:
    """Everything has run, in the schedule's order, but W where it fills waits; and nothing is left."""
    assert pipe.queue.pending() == pipe.queue.bytes == 0
    timeline, row = pipe.last.timeline, schedule.actions[pipe.rank]
    ran = [event.action for event in timeline.events[pipe.rank]]
    moves = ("W",) if case.fill == "eager" or case.options.max_wgrad_bytes is not None else ()
    assert [a for a in ran if a.kind not in moves] == [a for a in row if a.kind not in ("O", "L", *moves)]
    copied = {event.action for events in timeline.copies or () for event in events}
    assert copied <= {action for action in row if action.kind in ("O", "L")}  # what is empty is not copied


def known(values: list[Any]) -> Any:
    (found,) = (value for value in values if value is not None)
    return found


def after(
    step: Step,
    schedule: Schedule | None,
    pipe: Pipeline,
    optimizer: Optimizer | None,
    state: dict[str, Any],
    batch: tuple[Any, Any, Any],
    transport: LocalTransport,
) -> list[Tensor]:
    """What follows a step. All but nothing makes weights final, and on other ranks, too, after a gather."""
    if step.after == "evaluate":
        loss = pipe.evaluate(*batch, schedule=schedule)
        total = known(pipe.gather(None if loss is None else loss.item()))
        return [torch.tensor(total), torch.tensor(pipe.last.auxiliary_losses().get("penalty", 0.0))]
    if step.after == "forward":
        outputs = pipe.forward(batch[0], None, batch[2], schedule=schedule)
        values = known(pipe.gather(outputs and torch.cat([each.flatten() for each in outputs]).tolist()))
        return [torch.tensor(values, dtype=torch.float64)]
    if optimizer is None:
        return []
    if step.after in ("validate", "offload", *READS):
        optimizer.validate()
    if step.after == "weights":
        optimizer.weights()
    elif step.after == "state":
        optimizer.state_dict()
    elif step.after == "load state":
        optimizer.load_state_dict(state)
    elif step.after == "offload":
        optimizer.offload_states()
    elif step.after == "another pipeline":  # its constructor compares weights
        Pipeline(pipe.modules.values(), pipe.schedule, F.mse_loss, transport, timeout=60).close()
    return []


# ---- both


@contextmanager
def late_copies(case: Case) -> Iterator[None]:
    """Meanwhile their destinations hold garbage."""
    now, wait = host_copies.copy, random.Random(0)

    def copy_late(pairs: host_copies.Pairs) -> None:
        for destination, _ in pairs:
            destination.fill_(0xAB)
        time.sleep(wait.choice([0, 0.001, 0.005]))
        now(pairs)
        time.sleep(wait.choice([0, 0.001]))

    with pytest.MonkeyPatch.context() as patch:
        if case.late:
            patch.setattr(host_copies, "copy", copy_late)
        yield


@pytest.mark.parametrize("part", range(3))
def test_random_pipelines_train_as_plain_torch(part: int) -> None:
    check_all(seed(part), 10)


@pytest.mark.slow
def test_more_random_pipelines() -> None:
    check_all(seed(3), 20)


def check_all(chosen: int, count: int) -> None:
    for number in range(count):
        case = Case(random.Random(f"{chosen} {number}"))
        try:
            check(case)
        except BaseException as error:
            raise AssertionError(f"ZBKERN_SEED={chosen}, number {number}:\n{case.describe()}") from error


def end_before_divergence(case: Case, steps: list[Any]) -> None:
    """Of plain torch, which then multiplies what rounding has left."""
    while any(not a.abs().max() < 1e6 for step in steps for a in step if a is not None and a.numel()):
        steps.pop()
    left = len(steps)
    for part in case.parts:
        del part[left:]
        left -= len(part)
    case.parts = [part for part in case.parts if part]


def check(case: Case) -> None:
    both = copy.deepcopy(nn.ModuleList(case.chunks)), copy.deepcopy(nn.ModuleList(case.chunks))
    seed = case.rng.getrandbits(32)
    found: list[list[Any]] = []
    for run, chunks in zip((one_process, pipelined), both, strict=True):
        for piece in pieces([*chunks], Hooked):
            piece.add_hooks()
        torch.manual_seed(seed)
        random.seed(seed)
        with late_copies(case):
            found.append(run(case, [*chunks]))
        end_before_divergence(case, found[0])
    clipped = case.optimizer is not None and case.limits != (None, None)
    allowed = 1e-5 if clipped else 1e-9  # the clipping coefficient is float32
    for step, (expected, got) in enumerate(zip(*found, strict=True)):
        for index, (a, b) in enumerate(zip(expected[: len(got)], got, strict=True)):
            assert (a is None) == (b is None), f"step {step}, {index}: {a} {b}"
            if a is not None and a.numel():
                error = (a - b).abs().max().item() / max(1e-3, a.abs().max().item())
                assert error < allowed, f"step {step}, {index}: {error}"
