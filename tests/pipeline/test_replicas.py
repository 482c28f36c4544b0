"""Data-parallel stages in a Pipeline: two stages of two replicas against one process with the whole batch."""

from __future__ import annotations

import functools
import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from test_optimizer import clip_in_float64
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbkern
from zbkern.pipeline import Optimizer, Pipeline, checkpoint, norms, schedules
from zbkern.pipeline.mailbox import PipelineError

pytestmark = pytest.mark.dist

WIDTH, MICROBATCHES, MAX_NORM = 6, 6, 20.0
KINDS = ("ddp", "fsdp")
PAGE = Path(__file__).parents[2] / "docs" / "data_parallel.md"


class Forced(torch.autograd.Function):
    """x * gain, with any gradient of the gain that a test wants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, value: float | None) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.value = value
        return x * gain

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain = ctx.saved_tensors
        found = (dy * x).sum().reshape(1) if ctx.value is None else torch.full_like(gain, ctx.value)
        return dy * gain, found, None


class Block(nn.Module):
    """Converted layers, and parameters that zbkern does not know, one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.force: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        return Forced.apply(x + torch.tanh(self.linear(self.norm(x))), self.gain, self.force)


def make_model(chunks: int, dtype: torch.dtype = torch.float64) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(), Block()).to(dtype) for _ in range(chunks)]


def batch(step: int, replica: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * replica + step)
    return torch.randn(2, MICROBATCHES, 3, WIDTH, generator=generator).to(dtype).unbind()


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.float() if outputs.dtype.itemsize < 4 else outputs, targets)


def mesh() -> DeviceMesh:
    if not hasattr(mesh, "found"):
        mesh.found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    return mesh.found


def wrap(kind: str, module: nn.Sequential, **options: Any) -> nn.Module:
    zbkern.convert(module)
    if kind == "ddp":
        options.setdefault("bucket_cap_mb", 0.0003)
        return nn.parallel.DistributedDataParallel(module, process_group=mesh().get_group("replica"), **options)
    from torch.distributed.fsdp import fully_shard

    options.setdefault("reshard_after_forward", False)
    for block in module:
        fully_shard(block, mesh=mesh()["replica"], **options)
    return fully_shard(module, mesh=mesh()["replica"], **options)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Setup:
    """This rank's part of the pipeline that its replica is."""

    def __init__(self, kind: str, name: str, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        self.schedule = getattr(schedules, name)(2, MICROBATCHES)
        self.replica, self.stage = divmod(dist.get_rank(), 2)
        self.chunks = self.schedule.chunks_of(self.stage)
        model = make_model(len(self.schedule.placement), dtype)
        self.plain = [model[chunk] for chunk in self.chunks]
        self.modules = [wrap(kind, module, **options) for module in self.plain]
        self.dtype = dtype

    def pipe(self, **options: Any) -> Pipeline:
        options = {"timeout": 30, **options}
        return Pipeline(self.modules, self.schedule, mean_square, mesh().get_group("stage"), **options)

    def data(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        inputs, targets = batch(step, self.replica, self.dtype)
        last = len(self.schedule.placement) - 1
        return (inputs if 0 in self.chunks else None, targets if last in self.chunks else None)

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.plain for p in module.parameters()]

    def named(self, read: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {
            f"{chunk}.{name}": whole(read(p)).detach().clone()
            for chunk, module in zip(self.chunks, self.plain, strict=True)
            for name, p in module.named_parameters()
        }


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def plain_steps(
    chunks: int, steps: int, forced: dict[tuple[int, int], float] | None = None
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], list[float]]:
    """One process and both replicas' data: gradients and weights after every step, losses of replica 0."""
    model = make_model(chunks)
    named = {f"{c}.{name}": p for c, module in enumerate(model) for name, p in module.named_parameters()}
    optimizer = make_optimizer(list(named.values()))
    gradients, weights, losses = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        for replica in range(2):
            for index, (x, y) in enumerate(zip(*(part.split(1) for part in batch(step, replica)), strict=True)):
                for chunk, module in enumerate(model):
                    value = (forced or {}).get((chunk, step))  # the mean over replicas halves it
                    module[1].force = value / 2 if value is not None and (replica, index) == (1, 2) else None
                loss = mean_square(nn.Sequential(*model)(x), y) / MICROBATCHES
                (loss / 2).backward()
                if replica == 0:
                    losses = [*losses, 0.0] if index == 0 else losses
                    losses[-1] += loss.item()
        gradients.append({name: p.grad.clone() for name, p in named.items()})
        if forced is None or math.isfinite(clip_in_float64(list(named.values()), MAX_NORM)):
            optimizer.step()
        weights.append({name: p.detach().clone() for name, p in named.items()})
    return gradients, weights, losses


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], at: Any, **tolerance: float) -> None:
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **tolerance, msg=lambda m, n=name: f"{at}, {n}: {m}")


# ---- gradients and steps


def train(kind: str, name: str, fill: str, options: dict[str, Any], planned: dict[str, Any]) -> None:
    setup = Setup(kind, name, **options)
    expected, weights, losses = plain_steps(len(setup.schedule.placement), 3)
    optimizer = make_optimizer(setup.parameters())
    with setup.pipe(fill=fill, **planned) as pipe:
        for step in range(3):
            optimizer.zero_grad()
            loss = pipe.step(*setup.data(step))
            if loss is not None and setup.replica == 0:
                assert loss.item() == pytest.approx(losses[step], rel=1e-9)
            assert_close(setup.named(lambda p: p.grad), expected[step], step)
            optimizer.step()
            assert_close(setup.named(lambda p: p), weights[step], step)
        value = pipe.evaluate(*setup.data(0))
        again = pipe.evaluate(*setup.data(0))
        assert value is None or torch.equal(value, again)


@pytest.mark.parametrize("fill", ["planned", "eager"])
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h2", "zb_v"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(four_ranks: Any, kind: str, name: str, fill: str) -> None:
    four_ranks.run(train, kind, name, fill, {}, {})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ddp", {"gradient_as_bucket_view": True, "bucket_cap_mb": 25}),
        ("fsdp", {"reshard_after_forward": True}),
    ],
)
def test_options_of_the_wrappers(four_ranks: Any, kind: str, options: dict[str, Any]) -> None:
    four_ranks.run(train, kind, "zb_v", "eager", options, {"max_wgrad_bytes": 2000})


# ---- when reductions start


def record(kind: str, name: str) -> list[tuple[str, set[int]]]:
    """What happened in the second step, with the parameters that it was about: "B" done, "W", "reduce" begun."""
    setup = Setup(kind, name)
    events: list[tuple[str, set[int]]] = []
    with setup.pipe() as pipe, pytest.MonkeyPatch.context() as patch:
        if kind == "ddp":

            def hook(state, bucket):  # unannotated: DDP wants the types themselves, not their names
                events.append(("reduce", {id(p) for p in bucket.parameters()}))
                work = dist.all_reduce(bucket.buffer().div_(2), group=state, async_op=True)
                return work.get_future().then(lambda future: future.value()[0])

            for module in setup.modules:
                module.register_comm_hook(mesh().get_group("replica"), hook)
        else:
            from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

            reduce = groups.foreach_reduce

            def recorded(parts: Any, *arguments: Any, **options: Any) -> Any:
                events.append(("reduce", {id(part._unsharded_param) for part in parts}))
                return reduce(parts, *arguments, **options)

            patch.setattr(groups, "foreach_reduce", recorded)
        done = pipe._replicas.backward_done
        patch.setattr(pipe._replicas, "backward_done", lambda chunk: (events.append(("B", set())), done(chunk)))
        landed = lambda tasks: events.append(("W", {id(p) for task in tasks for p in task.parameters}))  # noqa: E731
        pipe.queue.listeners.insert(0, landed)
        for _ in range(2):  # DDP settles its buckets in the first, FSDP2 makes its parameters
            events.clear()
            pipe.step(*setup.data(0))
    return events


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h2", "zb_v"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reduction_starts_after_its_last_w_and_under_the_others(four_ranks: Any, kind: str, name: str) -> None:
    chunks = 2 if name == "zb_v" else 1
    for events in four_ranks.run(record, kind, name):
        reductions = [index for index, (what, _) in enumerate(events) if what == "reduce"]
        reduced = [parameter for index in reductions for parameter in events[index][1]]
        assert len(reduced) == len(set(reduced)) == chunks * 10, "not every gradient is reduced once a step"
        assert len(reductions) >= 2 * chunks
        for index in reductions:
            later = set().union(*(parameters for what, parameters in events[index:] if what == "W"))
            assert not events[index][1] & later, "reduced before its last W"
        first = reductions[0]
        assert [what for what, _ in events[:first]].count("B") >= MICROBATCHES
        assert events[first - 1][0] == "W"
        assert events[first - 1][1] & events[first][1], "not reduced as soon as its last W had landed"
        assert "W" in {what for what, _ in events[first:]}, "no W is left to cover it"


def refuse() -> list[str]:
    messages = []
    module = make_model(1)[0]
    setup = Setup("ddp", "zb_h1", static_graph=True)
    attempts = [setup.modules[0], wrap("ddp", module, find_unused_parameters=True)]
    attempts.append(nn.Sequential(wrap("ddp", make_model(1)[0])))
    for attempt in attempts:
        with pytest.raises(ValueError, match="Pipeline: the module of chunk") as caught:
            Pipeline(attempt, setup.schedule, mean_square, mesh().get_group("stage"))
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match="replan_every must be 0 with FSDP2 stages") as caught:
        Setup("fsdp", "zb_h1").pipe(replan_every=5)
    return [*messages, str(caught.value)]


def test_what_cannot_be_is_refused(four_ranks: Any) -> None:
    for static, unused, inside, replanned in four_ranks.run(refuse):
        assert "static_graph=True, which is of no use here" in static
        assert "find_unused_parameters=True" in unused
        assert "has DistributedDataParallel inside; wrap the whole module in it" in inside
        assert replanned.endswith("got 5")


def no_sync() -> None:
    """Two steps add up on each replica, the second reduces both."""
    setup = Setup("ddp", "zb_h1")
    expected = plain_gradients(2)
    with setup.pipe() as pipe:
        with setup.modules[0].no_sync():
            pipe.step(*setup.data(0))
        pipe.step(*setup.data(1))
    both = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    assert_close(setup.named(lambda p: p.grad), both, "both steps")


def accumulate(kind: str) -> None:
    """The same when each step reduces."""
    setup = Setup(kind, "zb_h1")
    expected = plain_gradients(2)
    with setup.pipe() as pipe:
        for step in range(2):
            pipe.step(*setup.data(step))
    both = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    assert_close(setup.named(lambda p: p.grad), both, "both steps")


def plain_gradients(steps: int) -> list[dict[str, Tensor]]:
    """Those of steps with the same weights."""
    model = make_model(2)
    found = []
    for step in range(steps):
        for replica in range(2):
            inputs, targets = batch(step, replica)
            (mean_square(nn.Sequential(*model)(inputs), targets) / 2).backward()
        found.append({f"{c}.{n}": p.grad.clone() for c, m in enumerate(model) for n, p in m.named_parameters()})
        nn.Sequential(*model).zero_grad()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_steps_add_up(four_ranks: Any, kind: str) -> None:
    four_ranks.run(accumulate, kind)


def test_no_sync_keeps_gradients_on_their_replica(four_ranks: Any) -> None:
    four_ranks.run(no_sync)


def sum_tied(kind: str) -> None:
    """A weight on both stages, and on both replicas."""
    setup = Setup(kind, "zb_h1")
    (expected,) = plain_gradients(1)
    weight = setup.plain[0][0].linear.weight
    with setup.pipe(tied={"shared": weight}) as pipe:
        pipe.step(*setup.data(0))
    both = expected["0.0.linear.weight"] + expected["1.0.linear.weight"]
    torch.testing.assert_close(whole(weight.grad), both)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_of_replicas(four_ranks: Any, kind: str) -> None:
    four_ranks.run(sum_tied, kind)


def run_page(shard: bool) -> list[Tensor]:
    """The example of the page; the weights that it comes to."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    if shard:
        line = re.findall(r"`(fully_shard\(chunk.*?)`", PAGE.read_text(encoding="utf-8"))[0]
        wrapped = re.findall(r"chunk = nn.parallel.*", code)[0]
        code = code.replace(wrapped, f"from torch.distributed.fsdp import fully_shard\n{line}")
    found: dict[str, Any] = {}
    torch.manual_seed(dist.get_rank() % 2)  # replicas start alike
    exec(code, found)
    return [whole(parameter).detach() for parameter in found["chunk"].parameters()]


def test_the_page_of_the_documentation_runs(four_ranks: Any) -> None:
    replicated, sharded = four_ranks.run(run_page, False), four_ranks.run(run_page, True)
    for rank in range(4):
        for ours, theirs, other in zip(replicated[rank], sharded[rank], replicated[rank ^ 2], strict=True):
            assert torch.equal(ours, other), "replicas differ"
            torch.testing.assert_close(ours, theirs)
    assert not torch.equal(replicated[0][0], replicated[1][0])


# ---- the optimizer without a barrier


class Trained:
    """What a rank has after steps with forced gradients: of (chunk, step), in one microbatch of the second replica."""

    def __init__(
        self,
        kind: str,
        name: str,
        forced: dict[tuple[int, int], float],
        dtype: torch.dtype = torch.float64,
        wrapper: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        setup = Setup(kind, name, dtype, **(wrapper or {}))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if dtype == torch.float16 else None
        self.losses: list[float] = []

        def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
            loss = mean_square(outputs, targets)
            return loss if scaler is None else scaler.scale(loss)

        def forward(chunk: int, original: Any, microbatch: int, *inputs: Any) -> Any:
            value = forced.get((chunk, step)) if (setup.replica, microbatch) == (1, 2) else None
            setup.plain[setup.chunks.index(chunk)][1].force = value
            return original(microbatch, *inputs)

        with Pipeline(setup.modules, setup.schedule, loss_fn, mesh().get_group("stage"), timeout=30) as pipe:
            for chunk, stage in pipe._stages.items():
                stage.forward = functools.partial(forward, chunk, stage.forward)
            optimizer = Optimizer(
                make_optimizer(setup.parameters()),
                pipe,
                max_norm=MAX_NORM,
                scaler=scaler,
                master_weights=dtype.itemsize < 4,
                **options,
            )
            for step in range(7):
                optimizer.zero_grad()
                loss = pipe.step(*setup.data(step))
                if loss is not None and setup.replica == 0:
                    self.losses.append(loss.item())
                optimizer.step()
            optimizer.validate()
        self.weights = setup.named(lambda p: p)
        self.counts = (optimizer.undone, optimizer.clipped, optimizer.skipped)
        self.scale = None if scaler is None else scaler.get_scale()


BAD = {(1, 1): 100.0, (0, 2): math.nan, (1, 3): math.inf, (1, 4): 90.0, (0, 5): 80.0}


def train_forced(kind: str, name: str, adaptive: bool) -> tuple[int, int, int]:
    """Equal to the plain loop up to rounding, and bit for bit to steps that wait."""
    at_once = Trained(kind, name, BAD, adaptive=adaptive)
    chunks = len(Setup(kind, name).schedule.placement)
    _, expected, losses = plain_steps(chunks, 7, BAD)
    assert_close(at_once.weights, expected[-1], "after all steps", rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(at_once.losses, losses if at_once.losses else [], rtol=1e-6, atol=0)
    waited = Trained(kind, name, BAD, undo=None)
    assert at_once.losses == waited.losses
    for key, value in at_once.weights.items():
        assert torch.equal(value, waited.weights[key]), key
    assert waited.counts[0] == 0
    return at_once.counts


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_of_replicas_equals_one_process(four_ranks: Any, kind: str, name: str, adaptive: bool) -> None:
    counts = four_ranks.run(train_forced, kind, name, adaptive)
    assert counts[0] == counts[2]
    assert counts[1] == counts[3]
    assert [count[0] for count in counts[:2]] == [1 if adaptive else 3, 0]
    assert {count[1:] for count in counts} == {(3, 2)}


def train_gathering() -> int:
    """With weights that every forward gathers anew, also those that run ahead and are void."""
    trained = Trained("fsdp", "zb_v", BAD, wrapper={"reshard_after_forward": True}, adaptive=False)
    _, expected, _ = plain_steps(4, 7, BAD)
    assert_close(trained.weights, expected[-1], "after all steps", rtol=1e-6, atol=1e-7)
    return trained.counts[0]


def test_forwards_that_gather_run_ahead(four_ranks: Any) -> None:
    assert four_ranks.run(train_gathering) == [3, 0, 3, 0]


def train_inverse(kind: str) -> int:
    trained = Trained(kind, "zb_h2", BAD, undo="inverse", adaptive=False)
    _, expected, _ = plain_steps(2, 7, BAD)
    assert_close(trained.weights, expected[-1], "after all steps", rtol=1e-6, atol=1e-7)
    return trained.counts[0]


@pytest.mark.parametrize("kind", KINDS)
def test_inverse_of_replicas(four_ranks: Any, kind: str) -> None:
    assert four_ranks.run(train_inverse, kind) == [3, 0, 3, 0]


def train_small(kind: str, dtype: torch.dtype, policy: bool) -> tuple[tuple[int, int, int], float | None]:
    """Steps at once are steps that wait, bit for bit, below fp32, too."""
    forced = {at: value * (64 if dtype == torch.float16 else 1) for at, value in BAD.items()}  # of the scaled loss
    wrapper = {}
    if policy:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        wrapper["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    at_once = Trained(kind, "zb_h2", forced, dtype, wrapper, adaptive=False)
    waited = Trained(kind, "zb_h2", forced, dtype, wrapper, undo=None)
    assert at_once.losses == waited.losses
    assert all(math.isfinite(loss) for loss in at_once.losses)
    for key, value in at_once.weights.items():
        assert torch.equal(value, waited.weights[key]), key
    assert at_once.scale == waited.scale
    return at_once.counts, at_once.scale


@pytest.mark.parametrize(
    ("kind", "dtype", "policy"),
    [
        ("ddp", torch.bfloat16, False),
        ("fsdp", torch.bfloat16, False),
        ("ddp", torch.float16, False),
        ("fsdp", torch.float16, False),
        ("fsdp", torch.float32, True),
    ],
)
def test_small_dtypes_of_replicas(four_ranks: Any, kind: str, dtype: torch.dtype, policy: bool) -> None:
    results = four_ranks.run(train_small, kind, dtype, policy)
    assert [counts[0] for counts, _ in results] == [3, 0, 3, 0]
    assert {counts[1:] for counts, _ in results} == {(3, 2)}
    assert {scale for _, scale in results} == {16.0 if dtype == torch.float16 else None}  # halved twice


def take_norms(kind: str) -> list[float]:
    setup = Setup(kind, "zb_v")
    with setup.pipe() as pipe:
        pipe.step(*setup.data(0))
        norm = norms.grad_norm(setup.parameters(), pipe)
        clipped = norms.clip_grad_norm_(setup.parameters(), norm / 4, pipe)
        return [norm, clipped, norms.grad_norm(setup.parameters(), pipe)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_gradient_counts_once_in_norms(four_ranks: Any, kind: str) -> None:
    (gradients,), _, _ = plain_steps(4, 1)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    for found in four_ranks.run(take_norms, kind):
        assert found == pytest.approx([norm, norm, norm / 4], rel=1e-5)


class Counting(nn.Module):
    """A buffer that every training forward changes, on every replica by another number."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.by = by
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += self.by
        return self.linear(x)


def count_forwards() -> list[float]:
    module = Counting(1 + dist.get_rank() // 2)
    wrapped = wrap("ddp", module)
    found = []
    with Pipeline(
        wrapped, schedules.zb_h1(2, 2), nn.functional.mse_loss, mesh().get_group("stage"), timeout=30
    ) as pipe:
        for _ in range(2):
            pipe.step(*torch.ones(2, 2, WIDTH))
            found.append(module.seen.item())
        pipe.evaluate(*torch.ones(2, 2, WIDTH))
        return [*found, module.seen.item()]


def test_buffers_come_from_the_first_replica_once_a_step(four_ranks: Any) -> None:
    first, _, second, _ = four_ranks.run(count_forwards)
    assert first == [2, 4, 4]
    assert second == [4, 2 + 4, 4]


def die_at_the_third_step(folder: Path) -> None:
    """Rank 3 does; the others end as scripts do, and leave what they have to say."""
    setup, rank = Setup("ddp", "zb_h1"), dist.get_rank()
    try:
        with setup.pipe() as pipe:
            for step in range(50):
                if step == 2 and rank == 3:
                    (folder / "start").write_text(str(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
                pipe.step(*setup.data(step))
    except PipelineError as error:
        (folder / f"{rank}").write_text(f"{time.monotonic()} {error}")
        os._exit(1)


def test_a_rank_that_dies_ends_all_replicas(tmp_path: Path) -> None:
    """Its own pipeline hears of it as always, the other when a reduction with it fails."""
    ranks = Ranks(4)
    try:
        with pytest.raises(AssertionError):
            ranks.run(die_at_the_third_step, tmp_path)
    finally:
        ranks.close()
    start = float((tmp_path / "start").read_text())
    expected = {**dict.fromkeys((0, 1), "action reduction over replicas"), 2: "rank 1 ended without a word"}
    for rank, message in expected.items():
        when, _, said = (tmp_path / str(rank)).read_text().partition(" ")
        assert float(when) - start < 10
        assert message in said, f"rank {rank}: {said}"


def go_on_after_a_failure() -> str:
    setup = Setup("ddp", "zb_h1")
    with setup.pipe() as pipe:
        pipe.step(*setup.data(0))
        if setup.stage == 1:
            setup.plain[0].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(PipelineError, match="rank 1, action 1F0: ZeroDivisionError"):
            pipe.step(*setup.data(1))
        with pytest.raises(PipelineError, match="cannot go on after a failure") as caught:
            pipe.step(*setup.data(1))
    return str(caught.value)


def test_replicas_do_not_go_on_after_a_failure(four_ranks: Any) -> None:
    assert all("restart all" in message for message in four_ranks.run(go_on_after_a_failure))


# ---- checkpoints


def rename(chunk: int, key: str) -> str:
    return f"chunk{chunk}.{key}"


def state(chunks: dict[int, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for chunk, module in chunks.items():
        for key, p in module.named_parameters():
            found[f"{chunk}.{key}"] = whole(p).detach().clone()
            found[f"{chunk}.{key}/exp_avg"] = whole(optimizer.state[p]["exp_avg"]).clone()
    return found


def save_or_load(folder: Path, kind: str, save: bool) -> dict[str, Tensor]:
    setup = Setup(kind, "zb_h1")
    with setup.pipe() as pipe:
        optimizer = Optimizer(make_optimizer(setup.parameters()), pipe, max_norm=MAX_NORM)
        for step in range(2 if save else 1):
            optimizer.zero_grad()
            pipe.step(*setup.data(step if save else 7))
            optimizer.step()
        if save:
            checkpoint.save(folder, 2, pipe, optimizer, {"position": 2}, rename=rename)
        else:
            assert checkpoint.load(folder, pipe, optimizer, rename=rename) == (2, {"position": 2})
        found = state(dict(zip(setup.chunks, setup.plain, strict=True)), optimizer.optimizer)
        optimizer.zero_grad()
        pipe.step(*setup.data(2))
        optimizer.step()
        optimizer.validate()
        return {**found, **{f"{name}/next": value for name, value in setup.named(lambda p: p).items()}}


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_replicas(four_ranks: Any, tmp_path: Path, kind: str) -> None:
    """Saved with one wrapper, loaded with both and in one process; steps after it are the same."""
    saved = four_ranks.run(save_or_load, tmp_path, kind, True)
    for other in KINDS:
        for rank, loaded in enumerate(four_ranks.run(save_or_load, tmp_path, other, False)):
            for key, value in loaded.items():
                if key.endswith("/next"):
                    torch.testing.assert_close(value, saved[rank][key], msg=lambda m, k=key: f"{k}: {m}")
                else:
                    assert torch.equal(value, saved[rank][key]), key
    chunks = dict(enumerate(make_model(2)))
    optimizer = make_optimizer([p for module in chunks.values() for p in module.parameters()])
    checkpoint.load(tmp_path, chunks, optimizer, rename=rename)
    for key, value in state(chunks, optimizer).items():
        assert torch.equal(value, saved[int(key[0])][key]), key
