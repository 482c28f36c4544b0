"""What a user's type checker makes of the public API: mypy reads it in `make lint`, with what --strict has; never run.

A line that must be refused says so in a `type: ignore`, which is an error itself when there is nothing to ignore.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import zbkern
from zbkern import functional
from zbkern.pipeline import (
    Costs,
    DeferredLogits,
    Optimizer,
    Pipeline,
    Schedule,
    Timeline,
    checkpoint,
    loss_traits,
    plan,
    profile,
    schedules,
    simulate,
    token_log_probs,
)


def layers(model: torch.nn.Sequential) -> None:
    assert_type(zbkern.convert(model), torch.nn.Sequential)
    assert_type(zbkern.convert(model, filter=lambda name, module: name != "head"), torch.nn.Sequential)
    assert_type(zbkern.restore(model), torch.nn.Sequential)
    assert_type(zbkern.unconverted(model), dict[str, str])
    assert_type(zbkern.coverage(model, lambda: model(torch.ones(1)).sum()).share, float)
    assert_type(zbkern.nn.Linear(64, 256, bias=False).weight, torch.nn.Parameter | Tensor)
    zbkern.nn.MLP(64, 256, activation="silu")
    zbkern.nn.Attention(64)  # type: ignore[call-arg]
    zbkern.convert("model")  # type: ignore[type-var]


def ops(x: Tensor, weight: Tensor) -> None:
    assert_type(functional.linear(x, weight, activation="gelu"), Tensor)
    assert_type(functional.gated_mlp(x, weight, weight, weight), Tensor)
    assert_type(functional.attention(x, x, x, True, functional.AttentionOptions(window=128)), Tensor)
    assert_type(functional.rotary(x, weight, weight), Tensor)
    assert_type(functional.embedding(x, weight, padding_idx=0), Tensor)
    assert_type(functional.linear_cross_entropy(x, weight, x, reduction="sum"), Tensor)
    assert_type(functional.grouped_linear(x, weight, [3, 4]), Tensor)
    assert_type(functional.grouped_mlp(x, weight, weight, gate=functional.GateOptions("gelu"), offsets=weight), Tensor)
    functional.rms_norm(x, weight, residual=x)
    functional.layer_norm(x, 1.0)  # type: ignore[arg-type]
    functional.linear(x, weight, 1.0)  # type: ignore[arg-type]


class Scale(zbkern.SeparableFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def dgrad(ctx: Any, dy: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, gain = ctx.saved_tensors
        return dy * gain, (x, dy)

    @staticmethod
    def wgrad(x: Tensor, dy: Tensor) -> Tensor:
        return (x * dy).sum(0)


def own_op(x: Tensor, gain: Tensor) -> None:
    Scale.apply(x, weights=[gain], name="scale")
    Scale.apply(x)  # type: ignore[call-arg]


@loss_traits(takes_deferred_logits=True, reduction="sum")
def policy_loss(logits: Tensor | DeferredLogits, tokens: Tensor) -> Tensor:
    return -token_log_probs(logits, tokens)[0].sum()


assert_type(policy_loss(torch.ones(1, 2, 3), torch.ones(1, 2)), Tensor)


def deferred() -> None:
    queue = zbkern.WGradQueue(max_bytes=2**30)
    with queue.defer(key=(0, 1)) as same:
        assert_type(same, zbkern.WGradQueue)
    keys = queue.keys()
    for chunk, unit in keys:
        assert_type(queue.run((chunk, unit)), int)
    assert_type(queue.run_one(), bool)
    assert_type(queue.pending(), int)
    assert_type(queue.discard(), int)
    assert_type(queue.bytes, int)
    assert_type(queue.peak_bytes, int)
    queue.run(key=[1], keys=[2])  # type: ignore[call-arg]


def schedule() -> Schedule:
    costs = Costs(forward=1, backward=1, weight=1, communication=0.1, activation=1, held=0.5)
    timeline = simulate(schedules.zb_h1(stages=4, microbatches=8), costs)
    assert_type(timeline, Timeline)
    assert_type(timeline.cost, float)
    assert_type(timeline.bubble_rate, float)
    answer = plan(costs, stages=4, microbatches=8, placement="v", chunks=2, memory_limit=4)
    assert_type(answer.timeline, Timeline)
    assert_type(answer.lower_bound, float)
    assert_type(answer.optimal, bool)
    plan(costs, 4)  # type: ignore[call-arg]
    assert_type(Schedule.from_csv(answer.schedule.to_csv(header=False), "planned"), Schedule)
    return answer.schedule


def train(modules: list[torch.nn.Module], inputs: Tensor, targets: Tensor) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output, target)

    assert_type(profile(modules, (0, 1), loss_fn, inputs, targets), Costs)
    Pipeline(modules[0], schedule(), loss_fn).close()
    with Pipeline(modules, schedule(), loss_fn, fill="eager", tied={"head": targets}) as pipe:
        assert_type(pipe, Pipeline)
        optimizer = Optimizer(torch.optim.AdamW(modules[0].parameters()), pipe, max_norm=1.0, undo=None)
        optimizer.zero_grad()
        assert_type(pipe.step(inputs, targets), Tensor | None)
        optimizer.step()
        optimizer.validate()
        assert_type(optimizer.last_norm, float | None)
        assert_type(optimizer.undone, int)
        assert_type(pipe.evaluate(inputs, targets), Tensor | None)
        assert_type(pipe.queue, zbkern.WGradQueue)
        assert_type(pipe.last.gather_timeline(), Timeline)
        Optimizer(torch.optim.AdamW(modules[0].parameters(), lr=3e-4), pipe, master_weights=True)
        checkpoint.save("folder", 100, pipe, optimizer, extra={"epoch": 1})
        Pipeline(modules, schedule(), loss_fn, timeout="long")  # type: ignore[arg-type]


def rooms(pipe: Pipeline, optimizer: Optimizer) -> None:
    """What each room asks of another room's class, in a protocol of its own, is what that class has."""
    pipe.attach(optimizer)
    assert_type(pipe.optimizer, torch.optim.Optimizer | None)
    pipe.optimizer = optimizer  # type: ignore[misc]
    pipe.detach()
    checkpoint.load("folder", pipe, optimizer)
    checkpoint.save("folder", 1, torch.nn.Linear(2, 2), torch.optim.SGD([]))
    checkpoint.save("folder", 1, "model")  # type: ignore[arg-type]
    Optimizer(torch.optim.SGD([]), pipe)
    Optimizer(torch.optim.SGD([]), "pipe")  # type: ignore[arg-type]


def engines_of_verl(model: Any, engine: Any, optimizer: Any, checkpoints: Any) -> None:
    """They have all that verl asks of an engine: without one of its methods they could not be made."""
    from zbkern.integrations.verl import PipelineEngineWithLMHead, PipelineEngineWithValueHead

    PipelineEngineWithLMHead(model, engine, optimizer, checkpoints)
    PipelineEngineWithValueHead(model, engine, optimizer, checkpoints)
