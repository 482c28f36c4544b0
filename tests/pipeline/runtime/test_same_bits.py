"""StepOptions(same_bits=True): logits, losses, gradients, norms and weights of any pipeline are those of one stage."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import assert_same, make_model, results_on_threads, run_pipelines
from zbkern.pipeline import (
    Optimizer,
    Pipeline,
    PipelineError,
    Schedule,
    ScheduleError,
    StepOptions,
    cut,
    loss_traits,
    schedules,
    token_log_probs,
)
from zbkern.pipeline.transport.local import LocalTransport

transformers = pytest.importorskip("transformers")

M = 5
SCHEDULES: list[tuple[Callable[..., Schedule], int]] = [
    (schedules.one_f_one_b, 2),
    (schedules.zb_h1, 2),
    (schedules.zb_h2, 4),
    (schedules.zb_v, 1),
    (schedules.zb_v, 2),
    (functools.partial(schedules.interleaved, chunks=2), 2),
    (functools.partial(schedules.interleaved_zero_bubble, chunks=2), 2),
    (schedules.v_min, 2),
]


def batch(packed: bool) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Short sequences, of which merged W on a CPU are sums of another order; a packed row is of two."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = [], []
    for _ in range(M):
        ids = torch.randint(48, (1, 12), generator=generator)
        targets.append(nn.functional.pad(ids[:, 1:], (0, 1), value=-100))
        inputs.append({"input_ids": ids})
        if packed:
            inputs[-1]["position_ids"] = torch.tensor([[*range(5), *range(7)]])
            targets[-1][:, 4] = -100
    return inputs, targets


def mean_loss(output: Any, labels: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@functools.cache
def found(
    make: Callable[..., Schedule],
    ranks: int,
    dtype: torch.dtype,
    packed: bool,
    tied: bool,
    same: bool,
    fill: str = "planned",
) -> Any:
    """By name: logits, log-probs of forward and of step, losses, norms, gradients and weights after two steps."""
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=48,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    schedule = make(ranks, M)
    inputs, targets = batch(packed)

    def of_rank(transport: LocalTransport) -> dict[str, Any]:
        values: dict[str, Any] = {}
        chunks = [*map(zbkern.convert, cut(copy.deepcopy(model), schedule, rank=transport.rank))]
        options = StepOptions(same_bits=same)
        with Pipeline(chunks, schedule, mean_loss, transport, fill=fill, timeout=60, options=options) as pipe:
            adamw = torch.optim.AdamW(nn.ModuleList(chunks).parameters(), lr=1e-2)
            optimizer = Optimizer(adamw, pipe, max_norm=0.1)
            if (outputs := pipe.forward(inputs)) is not None:
                values["logits"] = [getattr(output, "logits", output) for output in outputs]
            for step in range(2):
                optimizer.zero_grad()
                if (loss := pipe.step(inputs, targets)) is not None:
                    values[f"loss {step}"] = loss
                gradients = {n: p.grad.clone() for c in chunks for n, p in c.named_parameters() if p.grad is not None}
                values.update({f"gradient {step} {name}": gradient for name, gradient in gradients.items()})
                optimizer.step()
                optimizer.validate()
                values[f"norm {step}"] = optimizer.last_norm
            values.update({f"weight {n}": p.detach().clone() for c in chunks for n, p in c.named_parameters()})
        return values

    by_rank = results_on_threads(ranks, of_rank)
    return {name: value for values in by_rank for name, value in values.items()}


@pytest.mark.parametrize(
    ("dtype", "packed"),
    [
        (torch.float32, False),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.slow),
    ],
)
def test_every_pipeline_has_the_bits_of_one_stage(dtype: torch.dtype, packed: bool) -> None:
    one = found(schedules.one_f_one_b, 1, dtype, packed, False, True)
    assert len(one) > 100
    for make, ranks in SCHEDULES:
        assert_same(one, found(make, ranks, dtype, packed, False, True))
    assert_same(one, found(schedules.zb_h1, 2, dtype, packed, False, True, "eager"))


@pytest.mark.parametrize(
    ("dtype", "pipelines"),
    [
        (torch.float32, [(schedules.zb_h1, 2), (schedules.zb_v, 1)]),
        pytest.param(torch.bfloat16, [(schedules.zb_h1, 2), *SCHEDULES[3:5]], marks=pytest.mark.slow),
    ],
)
def test_a_tied_weight_has_the_same_bits_on_one_rank_and_on_two(dtype: torch.dtype, pipelines: Any) -> None:
    """One rank, or a V, has both layers."""
    one = found(schedules.one_f_one_b, 1, dtype, False, True, True)
    both = one | {name.replace("model.embed_tokens", "lm_head"): value for name, value in one.items()}
    for make, ranks in pipelines:
        other = found(make, ranks, dtype, False, True, True)
        assert one.keys() <= other.keys()
        assert_same({name: both[name] for name in other}, other)  # two ranks have it under both names


def test_without_it_bits_differ() -> None:
    """Or the tests above could not fail."""
    one = found(schedules.one_f_one_b, 1, torch.float32, False, False, False)
    other = found(schedules.zb_h2, 4, torch.float32, False, False, False)
    differ = [name for name in one if name.startswith("gradient 0") and not torch.equal(one[name], other[name])]
    assert differ
    torch.testing.assert_close({n: one[n] for n in differ}, {n: other[n] for n in differ}, rtol=1e-4, atol=1e-6)
    assert one["norm 0"] == pytest.approx(other["norm 0"], rel=1e-6)


@pytest.mark.parametrize("deferred", [False, True])
def test_log_probs_of_forward_are_those_of_step(deferred: bool) -> None:
    """Also between pipelines: those that one has are another's to the bit."""
    inputs, targets = batch(False)
    by_pipeline: list[list[Tensor]] = []
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, vocab_size=48
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for schedule in (schedules.one_f_one_b(1, M), schedules.zb_v(2, M), schedules.zb_h1(2, M)):
        in_step: list[Tensor] = []

        @loss_traits(takes_deferred_logits=deferred)
        def loss(logits: Any, tokens: Tensor, kept: list[Tensor] = in_step) -> Tensor:
            log_probs, _ = token_log_probs(logits, tokens)
            if not torch.is_grad_enabled():
                return log_probs
            kept.append(log_probs.detach())
            return -log_probs.mean()

        def of_rank(transport: LocalTransport, schedule: Schedule = schedule, loss: Any = loss) -> Any:
            chunks = [*map(zbkern.convert, cut(model, schedule, rank=transport.rank))]
            options = StepOptions(same_bits=True)
            with Pipeline(chunks, schedule, loss, transport, timeout=60, options=options) as pipe:
                before = pipe.forward(inputs, targets)
                pipe.step(inputs, targets)
                return before

        before = next(each for each in results_on_threads(schedule.ranks, of_rank) if each is not None)
        assert_same(before, in_step)
        by_pipeline.append(before)
    assert_same(*by_pipeline)


def test_a_schedule_that_changes_the_order_of_a_sum_is_refused() -> None:
    schedule = schedules.zb_h1(2, 4)
    rows = [[*row] for row in schedule.actions]
    places = [place for place, action in enumerate(rows[1]) if action.kind == "W"][-2:]
    rows[1][places[0]], rows[1][places[1]] = rows[1][places[1]], rows[1][places[0]]
    other = Schedule.build(rows, schedule.placement, 4, "other")
    chunks = [*map(zbkern.convert, make_model(2))]
    message = r"got W of microbatch 3 out of order, in chunk 1 on rank 1: leave same_bits out"
    with pytest.raises(ScheduleError, match=message):
        run_pipelines(other, chunks, lambda pipe: None, options=StepOptions(same_bits=True))
    run_pipelines(other, chunks, lambda pipe: None)


def test_a_parameter_of_two_layers_whose_sums_cannot_be_apart_is_refused() -> None:
    """One module twice, at once; hooks, which may come later, in a step. Frozen ones have no sums."""
    twice = nn.Linear(4, 4)
    schedule, options = schedules.one_f_one_b(1, 2), StepOptions(same_bits=True)
    x = torch.randn(4, 4)
    message = r"got one for '0.weight' and '1.weight', .* or leave same_bits out"
    for chunk in nn.Sequential(twice, twice), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)):
        chunk[1].weight = chunk[0].weight
        handle = chunk[0].weight.register_hook(lambda gradient: None)
        with pytest.raises((ValueError, PipelineError), match=message):
            run_pipelines(schedule, [chunk], lambda pipe: pipe.step(x, x), options=options)
        handle.remove()
        chunk.requires_grad_(False)
        run_pipelines(schedule, [chunk], lambda pipe: pipe.step(x, x), options=options)


@pytest.mark.parametrize("main_grad", [False, True])
def test_between_steps_a_shared_parameter_is_one(main_grad: bool) -> None:
    """Also after a step that fails; gradients go on where they are kept."""
    torch.manual_seed(0)
    chunk = zbkern.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    chunk[1].weight = chunk[0].weight
    plain, x = copy.deepcopy(chunk), torch.randn(4, 4)
    if main_grad:
        chunk[0].weight.main_grad = torch.zeros(4, 4, dtype=torch.float64)

    def steps(pipe: Pipeline) -> None:
        for _ in range(2):
            pipe.step(x, x)
            assert chunk[1].weight is chunk[0].weight
        with pytest.raises(PipelineError):
            pipe.step(x, x[:, :3])
        assert chunk[1].weight is chunk[0].weight
        assert len([*chunk.parameters()]) == 3

    run_pipelines(schedules.one_f_one_b(1, 2), [chunk], steps, options=StepOptions(same_bits=True))
    for _ in range(2):
        nn.functional.mse_loss(plain(x), x).backward()
    weight = chunk[0].weight
    torch.testing.assert_close(weight.main_grad.float() if main_grad else weight.grad, plain[0].weight.grad)
