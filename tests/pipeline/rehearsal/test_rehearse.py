from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import make_data, make_model, one_rank, results_on_threads
from zbkern.__main__ import main
from zbkern.pipeline import (
    Action,
    Carry,
    Costs,
    Event,
    Optimizer,
    Pipeline,
    Schedule,
    ScheduleError,
    StepOptions,
    plan,
    rehearse,
    schedules,
    simulate,
)
from zbkern.pipeline.rehearsal.rehearse import Rehearsal, joined, peak_bytes
from zbkern.pipeline.rehearsal.rehearse import _lengths as lengths
from zbkern.pipeline.rehearsal.table import table
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.planning.costs.flat import flat_costs
from zbkern.schedules.actions import COPIES

M = 8
RECOMPUTED = plan(
    Costs(checkpoint=0.1, held=0.5), 2, M, 1, memory_limit=1.2, recompute=True, effort=0
).schedule  # with an R
OFFLOADED = plan(
    Costs(held=0.5, offload_bandwidth=2.0, reload_bandwidth=2.0), 2, M, 1, memory_limit=1.2, offload=True, effort=0
).schedule  # with an O and an L
SCHEDULES = [
    RECOMPUTED,
    OFFLOADED,
    schedules.interleaved(2, M, 2),
    schedules.zb_v(2, M // 2, slices=2),
    *(
        pytest.param(schedule, marks=pytest.mark.slow)
        for schedule in (schedules.one_f_one_b(8, M), schedules.zb_h1(3, M), schedules.dualpipe_v(2, M))
    ),
]


class Sliced(nn.Module):
    """A chunk whose tokens do not see each other."""

    def __init__(self, chunk: nn.Module) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, *inputs: torch.Tensor, carry: Carry) -> Any:
        return self.chunk(*inputs)


def chunks_of(schedule: Schedule) -> Callable[[int], list[nn.Module]]:
    model = make_model(len(schedule.placement))
    if schedule.is_sliced:
        model = [Sliced(chunk) for chunk in model]
    return lambda rank: [zbkern.convert(copy.deepcopy(model[chunk])) for chunk in schedule.chunks_of(rank)]


def adam(pipe: Pipeline) -> Optimizer:
    parameters = [parameter for module in pipe.modules.values() for parameter in module.parameters()]
    return Optimizer(torch.optim.AdamW(parameters, lr=1e-3), pipe, max_norm=1.0)


def rehearsed(schedule: Schedule, **options: Any) -> Rehearsal:
    batch = make_data(schedule.microbatches)
    return rehearse(chunks_of(schedule), schedule, nn.functional.mse_loss, *batch, repeats=1, **options)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_every_rank_runs_its_whole_row_in_the_memory_of_the_whole_pipeline(schedule: Schedule) -> None:
    found = rehearsed(schedule, optimizer=adam)
    assert [found.ranks[rank].peak_bytes for rank in range(schedule.ranks)] == held_in_pipeline(schedule)
    for rank, row in enumerate(schedule.actions):
        passes = [action for action in row if action.kind not in COPIES]
        assert [action for action, _ in found.ranks[rank].passes] == passes
        assert [event.action for event in found.timeline.events[rank]] == passes
        assert found.ranks[rank].optimizer > 0
    assert found.seconds > found.timeline.cost > 0


def held_in_pipeline(schedule: Schedule) -> list[int]:
    """What each rank holds at most in a pipeline of all of them."""
    make, batch = chunks_of(schedule), make_data(schedule.microbatches)

    def of_rank(transport: LocalTransport) -> int:
        with Pipeline(make(transport.rank), schedule, nn.functional.mse_loss, transport) as pipe:
            optimizer = adam(pipe)

            def step() -> None:
                pipe.step(*batch)
                optimizer.step()
                optimizer.validate()

            return peak_bytes(pipe, optimizer, step, StepOptions())

    return results_on_threads(schedule.ranks, of_rank)


class Tells(nn.Module):
    """Takes whatever tensors, of which it notes the shapes, and returns one of another width."""

    def __init__(self, before: int, after: int, seen: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(1, after), seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(x.shape))
        return self.linear(x.mean(-1, keepdim=True))


def test_a_message_that_was_guessed_wrong_is_made_up_again() -> None:
    schedule = schedules.zb_v(2, M)  # rank 0 needs the input of chunk 3 before anybody has run chunk 2
    seen: list[list[tuple[int, ...]]] = [[], [], [], []]
    widths = [3, 4, 5, 6, 2]

    def make(rank: int) -> list[nn.Module]:
        return [zbkern.convert(Tells(*widths[at : at + 2], seen[at])) for at in schedule.chunks_of(rank)]

    batch = torch.randn(2 * M, 3), torch.randn(2 * M, 2)
    rehearse(make, schedule, nn.functional.mse_loss, *batch, repeats=1)
    assert [shapes[-1] for shapes in seen] == [(2, width) for width in widths[:4]]
    assert seen[3][0] != seen[3][-1]


def test_messages_that_wait_count_beside_what_a_rank_holds_alone() -> None:
    schedule, widths = schedules.zb_v(2, M), [3, 4, 5, 6, 2]

    def make(rank: int) -> list[nn.Module]:
        return [zbkern.convert(Tells(*widths[at : at + 2], [])) for at in schedule.chunks_of(rank)]

    batch = torch.randn(2 * M, 3), torch.randn(2 * M, 2)
    found = rehearse(make, schedule, nn.functional.mse_loss, *batch, repeats=1)
    costs = Costs(message=[2 * 4 * width for width in widths[1:4]])
    for rank, planned in enumerate(flat_costs(costs, schedule).ahead):
        assert found.ranks[rank].waiting_bytes == planned > 0
        assert found.peak_bytes(rank) == found.ranks[rank].peak_bytes + planned


def test_messages_have_the_size_of_what_was_sent() -> None:
    deviations: list[float] = []

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            deviations.append(x.std().item())
            return 50 * self.linear(x).tanh()

    schedule = schedules.one_f_one_b(2, 2)
    batch = torch.randn(32, 64), torch.randn(32, 64)
    rehearse(lambda rank: Large(), schedule, nn.functional.mse_loss, *batch, repeats=1)
    first, second = deviations[: len(deviations) // 2], deviations[len(deviations) // 2 :]
    assert max(first) < 2
    assert 10 < min(second) < max(second) < 50


class Positions(nn.Module):
    """Hands on the positions of tokens, which index a table: others than these would be out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.table(positions), positions


def test_integers_in_messages_stay_what_they_are() -> None:
    schedule, positions = schedules.zb_h1(3, 2), torch.arange(14).reshape(2, 7) % 7
    inputs = torch.randn(2, 7, 6), positions
    loss = lambda output, target: (output[0] - target).square().mean()  # noqa: E731
    found = rehearse(lambda rank: Positions(), schedule, loss, inputs, torch.randn(2, 7, 6), repeats=1)
    assert len(found.ranks) == 3


def test_weights_of_several_ranks_are_trained_alone() -> None:
    class Tied(nn.Linear):
        @property
        def tied_parameters(self) -> dict[str, nn.Parameter]:
            return {"shared": self.weight}

    batch = torch.randn(8, 4), torch.randn(8, 4)
    for schedule in (schedules.one_f_one_b(3, 4), schedules.zb_v(2, 4)):
        found = rehearse(
            lambda rank, schedule=schedule: [Tied(4, 4) for _ in schedule.chunks_of(rank)],
            schedule,
            nn.functional.mse_loss,
            *batch,
            optimizer=adam,
            repeats=1,
        )
        assert len(found.ranks) == schedule.ranks


@pytest.mark.parametrize("make", [schedules.zb_h1, schedules.zb_v, schedules.interleaved])
def test_passes_are_joined_as_they_are_simulated(make: Callable[[int, int], Schedule]) -> None:
    schedule = make(4, M)
    count = len(schedule.placement)
    costs = Costs([1.0 + 0.1 * at for at in range(count)], 1.5, [0.5 + 0.05 * at for at in range(count)], 0.25)
    expected = simulate(schedule, costs)
    passes = {
        rank: [(event.action, event.end - event.start) for event in row] for rank, row in enumerate(expected.events)
    }
    found = joined(schedule, passes, lambda unit: [0.25] * (count - 1), lambda unit: [0.0] * (count - 1))
    assert found.cost == pytest.approx(expected.cost)
    for ours, theirs in zip(found.events, expected.events, strict=True):
        assert [event.end for event in ours] == pytest.approx([event.end for event in theirs])


def test_ranks_run_no_pass_while_they_send_and_receive() -> None:
    """Unless they wait anyway. Chunks 1 and 2 are on one rank, between them nothing is sent."""
    schedule = schedules.zb_v(2, 1)
    lengths = {
        rank: [(action, 20.0 if str(action) == "3W0" else 4.0) for action in row]
        for rank, row in enumerate(schedule.actions)
    }
    found = joined(schedule, lengths, lambda unit: [3.0, 9.0, 3.0], lambda unit: [1.0, 9.0, 2.0])
    starts = [{str(event.action): event.start for event in row} for row in found.events]
    assert starts[0] == {"0F0": 0.0, "3F0": 18.0, "3B0": 22.0, "3W0": 28.0, "0B0": 49.0, "0W0": 53.0}
    assert starts[1] == {"1F0": 7.0, "2F0": 11.0, "2B0": 29.0, "2W0": 33.0, "1B0": 37.0, "1W0": 42.0}


def test_ranks_that_do_not_run_take_as_long_as_the_nearest() -> None:
    schedule = schedules.one_f_one_b(6, M)
    found = rehearsed(schedule, ranks=[2, 5])
    assert [*found.ranks] == [2, 5]

    def times(rank: int, kind: str) -> list[float]:
        row = found.timeline.events[rank]
        return [event.end - event.start for event in row if event.action.kind == kind]

    assert times(3, "F") == pytest.approx(times(2, "F"))
    assert times(4, "BW") == pytest.approx(times(5, "BW"))
    text = table(found, tokens=640, memory=1.0, planned=simulate(schedule, Costs()), compare=True)
    for said in ("does not fit", "planned, ms", "interleaved", "the other 4 ranks", "tokens/s"):
        assert said in text


@pytest.mark.parametrize("link", [{}, {"latency": 10.0}, {"bandwidth": 8.0}, {"host_bandwidth": 8.0}], ids=str)
def test_a_slower_link_makes_a_longer_step(link: dict[str, float]) -> None:
    """Of seconds, and bytes per second; its passes stay what they are."""
    found = rehearsed(schedules.zb_h1(2, 2), ranks=[0], **link)
    assert (found.timeline.cost > 10) == bool(link)
    assert max(found.timeline.busy) < 5


def test_ranks_have_their_own_speeds() -> None:
    """All that was measured of a rank takes 1/speed of the time, also of one that did not run."""
    schedule, speeds = schedules.one_f_one_b(4, M), (1.0, 0.5, 1.0, 0.25)
    found = rehearsed(schedule, ranks=[0, 1, 2], speeds=speeds, optimizer=adam)
    for rank in range(4):
        for ours, alike in zip(found.timeline.events[rank], found.alike.events[rank], strict=True):
            assert ours.end - ours.start == pytest.approx((alike.end - alike.start) / speeds[rank])
    assert sum(length for _, length in found.ranks[1].passes) == pytest.approx(found.timeline.busy[1])
    assert found.costs.speeds == speeds
    assert found.costs.forward[1] == pytest.approx(rehearsal_of(found).costs.forward[1])
    again = simulate(schedule, found.costs)
    assert again.busy[3] / again.busy[2] == pytest.approx(4.0, rel=0.05)
    assert "speeds 1 0.5 1 0.25" in table(found)


def rehearsal_of(found: Rehearsal) -> Rehearsal:
    """The same, of ranks as fast as this device."""
    return Rehearsal(found.schedule, found.ranks, found.alike, found.alike)


def test_a_pass_that_ends_before_the_one_it_ran_beside_takes_no_more_time() -> None:
    first, second, third = (Action("F", 0, 1), Action("BW", 1, 0), Action("F", 0, 2))
    events = [Event(0, first, 1.0, 5.0), Event(0, second, 1.0, 4.0), Event(0, third, 4.0, 7.0)]
    assert lengths(events) == [(first, 4.0), (second, 0.0), (third, 2.0)]


def test_a_batch_whose_sequences_are_cut_each_in_its_own_way_is_rehearsed() -> None:
    """Its costs by chunk, and other schedules by these, are refused."""
    order = [Action.parse(each) for each in ("0F0", "0F1", "0F2", "0F3", "0BW1", "0BW0", "0BW3", "0BW2")]
    schedule = Schedule.build([order], [0], 2, own_slices=[(3, 4), (2, 3)])
    inputs, targets = [torch.randn(1, n, 4) for n in (7, 5)], [torch.randn(1, n, 4) for n in (7, 5)]
    found = rehearse(lambda rank: Sliced(nn.Linear(4, 4)), schedule, nn.MSELoss(reduction="sum"), inputs, targets)
    assert [action for action, _ in found.ranks[0].passes] == [*order]
    with pytest.raises(ValueError, match=r"all sequences must be cut alike.*BatchPlan\.published"):
        found.compare()


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"speeds": [1.0, 2.0]}, ValueError, "rehearse: speeds must be one number per rank \\(4\\)"),
        ({"ranks": [4]}, ScheduleError, "ranks must be from 0 to 3; got \\[4\\]"),
        ({"latency": -1.0}, ValueError, "latency must be"),
        ({"bandwidth": 0.0}, ValueError, "rehearse: bandwidth must be a number above 0"),
        ({"host_bandwidth": 0.0}, ValueError, "rehearse: host_bandwidth must be a number above 0"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rehearsed(schedules.one_f_one_b(4, M), **wrong)


def test_a_rank_alone_has_the_gradients_of_its_first_chunks() -> None:
    schedule = schedules.one_f_one_b(1, M)
    make, batch, kept = chunks_of(schedule), make_data(M), []

    def keep(pipe: Pipeline) -> torch.optim.Optimizer:
        kept.append(pipe)
        return torch.optim.SGD(pipe.modules[0].parameters(), lr=0.0)

    rehearse(make, schedule, nn.functional.mse_loss, *batch, optimizer=keep, repeats=1)
    assert len(kept) == 1
    with one_rank(make(0), schedule) as pipe:
        pipe.step(*batch)
        assert all(parameter.grad is not None for parameter in pipe.modules[0].parameters())


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    file = tmp_path / "plan.csv"
    file.write_text("# partition: 0 2.5 3\n" + schedules.zb_h1(3, 4).to_csv(), encoding="utf-8")
    given = ["rehearse", "--config", str(tmp_path), "--plan", str(file), "--sequence", "16"]
    assert main([*given, "--memory", "80e9", "--compare"]) == 0
    text = capsys.readouterr().out
    assert text.count("fits") == 3
    assert "interleaved" in text
    assert main([*given, "--ranks", "3"]) == 2
    assert "ranks must be from 0 to 2" in capsys.readouterr().err


def test_the_command_takes_from_the_plan_what_it_is_for_and_refuses_what_a_rank_alone_has_not(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    file = tmp_path / "plan.csv"
    rehearse_it = ["rehearse", "--config", str(tmp_path), "--plan", str(file)]
    plan_it = ["plan", "--config", str(tmp_path), "--stages", "2", "--microbatches", "2", "--effort", "0"]
    more = ["--sequence", "24", "--microbatch-size", "2", "--data-parallel", "3", "--speeds", "1,.5"]
    assert main([*plan_it, *more, "--out", str(file)]) == 0
    capsys.readouterr()
    assert main(rehearse_it) == 0
    text = capsys.readouterr().out
    assert "the speeds 1 0.5" in text
    assert "3 pipelines share" in text
    rate, step, optimizer = (
        float(re.search(rf"([\d.,]+) {said}", text)[1].replace(",", ""))  # type: ignore[index]
        for said in ("tokens/s", "ms and", "ms for the optimizer")
    )
    assert rate * 2 * (step + optimizer) / 1e3 == pytest.approx(2 * 2 * 24, rel=0.05)
    text, order = file.read_text(), "0F0,0F1,0F2,0F3,0B1,0B0,0B3,0B2"
    for written, said in (
        (f"# tensor_parallel: 2\n{text}", "is for tensor_parallel 2, and a rank that runs alone"),
        ("# partition: 0 x\n0F0,0B0\n", "partition in .* must be numbers"),
        (f"# slices: 3 4, 2 3\n{order}\n", "cuts each sequence in its own way.*zbkern.pipeline.rehearse"),
    ):
        file.write_text(written)
        assert main(rehearse_it) == 2
        assert re.search(said, capsys.readouterr().err)
    assert main(["rehearse", "--config", str(tmp_path / "none"), "--plan", str(file)]) == 2
