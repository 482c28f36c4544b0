"""What a rank knows of others: messages until they are asked for, failures, and the calls that others are in."""

from __future__ import annotations

import pytest
import torch

from zbkern.pipeline import PipelineError
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.pipeline.transport.mailbox import Call, Mailbox, Note, Tag, Values

CALL = Call(0, "connecting")


def test_what_a_gather_has_is_taken_though_a_rank_has_failed_since() -> None:
    """Ranks that had it sooner have gone on with it."""
    mailbox = Mailbox(0)
    given, note = Values(1, "what rank 1 gives"), Note(1, "a note")
    for tag in (given, note):
        mailbox.put(tag, "here", 1, CALL)
    mailbox.fail("the cause")
    mailbox.wait_for(1, given, None)
    assert mailbox.take(given) == "here"
    for tag in (given, note):
        with pytest.raises(PipelineError, match="the cause"):
            mailbox.wait_for(1, tag, None)


def test_messages_of_steps_that_are_over_are_not_kept_whenever_they_come() -> None:
    mailbox, early, late = Mailbox(0), Tag(2, "F", 1, 0), Tag(2, "F", 1, 1)
    mailbox.put(early, "early", 1, CALL)
    mailbox.forget(3)
    mailbox.put(late, "late", 1, CALL)
    assert mailbox.peek(early) is mailbox.peek(late) is None
    mailbox.put(Tag(3, "F", 1, 0), "now", 1, CALL)
    assert mailbox.peek(Tag(3, "F", 1, 0)) == "now"


def test_ranks_that_neither_send_nor_receive_hear_of_different_calls() -> None:
    """The rank that finds them tells all: it begins the call, or is in it when it hears which one another is in."""
    said = "ranks make different calls: call 1 of this pipeline is step on rank 0 and evaluate on rank 1"
    first, second, third = LocalTransport.ring(3)
    first.begin("step")
    first.send(1, Note(0, "a message"), torch.ones(1))
    with pytest.raises(PipelineError, match=said):
        second.begin("evaluate")
    assert str(third.failure).startswith(said)

    first, second, third = LocalTransport.ring(3)
    first.begin("step")
    second.begin("evaluate")
    first.announce()
    assert str(third.failure).startswith(said)
