"""Lowering: every message sent and received once, in an order that survives blocking rendezvous on any channels."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbkern.pipeline import Action, Costs, Schedule, ScheduleError, lower, schedules
from zbkern.pipeline.lowering import CHANNELS, Lowered, Receive, Send, check_rendezvous, input_of, output_of

NAMES = schedules.NAMES


def receive_when_needed(schedule: Schedule) -> Lowered:
    """The obvious order: receive just before an action, send just after it."""
    programs = []
    for row in schedule.actions:
        program = []
        for action in row:
            before, after = input_of(schedule, action), output_of(schedule, action)
            program += [*([Receive(before)] if before else []), action, *([Send(after)] if after else [])]
        programs.append(tuple(program))
    return Lowered(schedule, tuple(programs))


@pytest.mark.parametrize("name", NAMES)
def test_no_channels_deadlock(name: str) -> None:
    for stages in (1, 2, 3, 5):
        for microbatches in (1, 2, 5, 11):
            lowered = lower(getattr(schedules, name)(stages, microbatches))
            for channel in CHANNELS:
                check_rendezvous(lowered, channel)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    times=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    channel=st.sampled_from(sorted(CHANNELS)),
)
def test_no_costs_deadlock(name: str, stages: int, microbatches: int, times: list[int], channel: str) -> None:
    """Passes and messages that take no time included: then many messages are ready at once."""
    check_rendezvous(lower(getattr(schedules, name)(stages, microbatches), Costs(*times)), channel)


@pytest.mark.parametrize("name", NAMES)
def test_every_message_once_and_every_action_in_place(name: str) -> None:
    schedule = getattr(schedules, name)(3, 5)
    programs = lower(schedule).programs
    for row, program in zip(schedule.actions, programs, strict=True):
        assert tuple(operation for operation in program if isinstance(operation, Action)) == row
    sent = [op.message for program in programs for op in program if isinstance(op, Send)]
    received = [op.message for program in programs for op in program if isinstance(op, Receive)]
    hops = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    assert len(set(sent)) == len(sent) == 2 * hops * schedule.microbatches
    assert sorted(sent) == sorted(received)


@pytest.mark.parametrize("name", NAMES)
def test_sends_follow_at_once_and_receives_are_ahead(name: str) -> None:
    schedule = getattr(schedules, name)(3, 5)
    for rank, program in enumerate(lower(schedule).programs):
        queued = set()
        for before, operation in zip((None, *program), program, strict=False):
            if isinstance(operation, Send):
                assert isinstance(before, Action)
                assert output_of(schedule, before) == operation.message
                assert operation.message.source == rank
            elif isinstance(operation, Receive):
                assert not isinstance(before, Action)  # behind a send, another receive, or nothing
                assert operation.message.target == rank
                queued.add(operation.message)
            else:
                assert input_of(schedule, operation) in queued | {None}


def test_the_obvious_order_deadlocks_and_the_check_says_how() -> None:
    with pytest.raises(ScheduleError) as error:
        check_rendezvous(receive_when_needed(schedules.one_f_one_b(2, 4)), "rank")
    message = str(error.value)
    assert "rank 0 at 0BW0 needs B0 for chunk 0 from rank 1" in message
    assert "rank 0 is held up in: send F1 for chunk 1 to rank 1" in message
    assert "rank 1 is held up in: send B0 for chunk 0 to rank 0" in message


def test_the_obvious_order_deadlocks_in_a_v_even_with_a_channel_per_link() -> None:
    """Both directions of a V carry activations and gradients, and the receiver wants them in another order."""
    check_rendezvous(receive_when_needed(schedules.zb_h1(4, 8)), "link")
    for name in ("zb_v", "v_half", "dualpipe_v"):
        with pytest.raises(ScheduleError, match="deadlock"):
            check_rendezvous(receive_when_needed(getattr(schedules, name)(4, 8)), "link")


def test_the_check_finds_what_is_lost() -> None:
    lowered = lower(schedules.gpipe(2, 1))
    for index, kind in ((0, Send), (1, Receive)):
        programs = [list(program) for program in lowered.programs]
        programs[index] = [operation for operation in programs[index] if not isinstance(operation, kind)]
        with pytest.raises(ScheduleError, match="rank 1 at 1F0 needs F0 for chunk 1 from rank 0"):
            check_rendezvous(Lowered(lowered.schedule, tuple(map(tuple, programs))))
    early = [list(program) for program in lowered.programs]
    early[0].sort(key=lambda operation: not isinstance(operation, Send))
    with pytest.raises(ScheduleError, match="send F0 for chunk 1 to rank 1 comes before what makes it"):
        check_rendezvous(Lowered(lowered.schedule, tuple(map(tuple, early))))


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="channel must be one of"):
        check_rendezvous(lower(schedules.gpipe(1, 1)), "wire")
    with pytest.raises(TypeError, match=r"expected what lower\(\) returns; got Schedule"):
        check_rendezvous(schedules.gpipe(1, 1))
    with pytest.raises(TypeError, match=r"must be a zbkern\.pipeline\.Schedule; got str"):
        lower("zb_h1")
    broken = Schedule(((Action("F", 0, 0),),), (0,), 1)
    with pytest.raises(ScheduleError, match="0B0 is missing"):
        lower(broken)
