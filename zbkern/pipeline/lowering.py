"""lower: the sends and receives of a schedule, in an order that cannot deadlock; check_rendezvous: runs and proves it.

The model is NCCL's: a send or receive is put into the queue of a channel and the rank goes on; a queue runs one
operation at a time, in order; a send ends only together with its receive; and a compute action starts when its input
has come. What is shared by a channel is up to the transport: a channel per link and direction, one per direction, or
one for everything a rank does.

The guarantee: put all messages of a step in one order in which a run of the schedule could send them. Every rank
queues its sends and receives in that order, a receive right after the send before it. Then no choice of channels
deadlocks. For take the first message that never arrives. All before it have, so nothing is ahead of it in any queue;
its receive is queued, right behind a send that has ended; and its sender is not stuck before sending it, because what
the sender waited for came earlier in the order, and has arrived.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from zbkern.pipeline.actions import Action, Schedule, ScheduleError
from zbkern.pipeline.costs import Costs
from zbkern.pipeline.simulate import simulate


class Message(NamedTuple):
    """The input of `chunk` (kind F) or the gradient of its output (kind B) of one microbatch, from rank to rank."""

    kind: str
    chunk: int
    microbatch: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} for chunk {self.chunk}"


class Send(NamedTuple):
    """Queue the sending of a message, and go on."""

    message: Message

    def __str__(self) -> str:
        return f"send {self.message} to rank {self.message.target}"


class Receive(NamedTuple):
    """Queue the receiving of a message, and go on; the action that needs it waits for it."""

    message: Message

    def __str__(self) -> str:
        return f"receive {self.message} from rank {self.message.source}"


Operation = Action | Send | Receive


@dataclass(frozen=True)
class Lowered:
    """A schedule with its communication: the operations of every rank, in order."""

    schedule: Schedule
    programs: tuple[tuple[Operation, ...], ...]


CHANNELS: dict[str, Callable[[Message], Hashable]] = {
    "link": lambda message: (message.source, message.target),
    "direction": lambda message: message.source < message.target,
    "rank": lambda message: None,
}


def input_of(schedule: Schedule, action: Action) -> Message | None:
    """The message that `action` waits for; None when its input is data, a loss, or made on the same rank."""
    kind, chunk, microbatch, _ = action
    producer = {"F": chunk - 1, "B": chunk + 1, "BW": chunk + 1}.get(kind, -1)
    return _message(schedule, "F" if kind == "F" else "B", producer, chunk, microbatch)


def output_of(schedule: Schedule, action: Action) -> Message | None:
    """The message that `action` makes; None when nobody, or only the same rank, needs it."""
    kind, chunk, microbatch, _ = action
    consumer = {"F": chunk + 1, "B": chunk - 1, "BW": chunk - 1}.get(kind, -1)
    return _message(schedule, "F" if kind == "F" else "B", chunk, consumer, microbatch)


def lower(schedule: Schedule, costs: Costs | None = None) -> Lowered:
    """Every rank's actions with sends and receives between them.

    A send follows its action at once. A receive is queued as early as the one order of messages allows: by the time at
    which they are ready to be sent, simulated with `costs` (passes of unit length when not given). Raises ScheduleError
    when the schedule is not valid.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"lower: schedule must be a zbkern.pipeline.Schedule; got {type(schedule).__name__}")
    schedule.validate()
    ready: dict[Message, tuple[float, ...]] = {}
    for timeline in (simulate(schedule), simulate(schedule, costs)):
        for row in timeline.events:
            for event in row:
                message = output_of(schedule, event.action)
                if message is not None:
                    # a pass that takes no time ends with its input: then the order of unit passes decides
                    ready[message] = (event.end, *ready.get(message, ()))
    order = sorted(ready, key=lambda message: (*ready[message], message))
    return Lowered(schedule, tuple(_program(schedule, rank, order) for rank in range(schedule.stages)))


def _program(schedule: Schedule, rank: int, order: list[Message]) -> tuple[Operation, ...]:
    """One rank's operations, its sends and receives in the given order of all messages."""
    program: list[Operation] = []
    queue = deque(message for message in order if rank in (message.source, message.target))

    def receive() -> None:
        while queue and queue[0].target == rank:
            program.append(Receive(queue.popleft()))

    receive()
    for action in schedule.actions[rank]:
        program.append(action)
        if output_of(schedule, action) is not None:
            program.append(Send(queue.popleft()))
            receive()
    return tuple(program)


def check_rendezvous(lowered: Lowered, channel: str = "rank") -> None:
    """Runs the programs with blocking rendezvous; raises ScheduleError, saying who waits for what, if they get stuck.

    channel: what shares a queue: "link" (one link in one direction), "direction" (all links to higher ranks, all to
    lower ranks), or "rank" (everything); the last is the hardest.
    """
    if not isinstance(lowered, Lowered):
        raise TypeError(f"check_rendezvous: expected what lower() returns; got {type(lowered).__name__}")
    if channel not in CHANNELS:
        raise ValueError(f"check_rendezvous: channel must be one of {sorted(CHANNELS)}; got {channel!r}")
    run = _Rendezvous(lowered, CHANNELS[channel])
    run.finish()


def _message(schedule: Schedule, kind: str, producer: int, consumer: int, microbatch: int) -> Message | None:
    last = len(schedule.placement) - 1
    if not (0 <= producer <= last and 0 <= consumer <= last):
        return None
    source, target = schedule.placement[producer], schedule.placement[consumer]
    return None if source == target else Message(kind, consumer, microbatch, source, target)


class _Rendezvous:
    def __init__(self, lowered: Lowered, channel: Callable[[Message], Hashable]) -> None:
        self._lowered, self._channel = lowered, channel
        self._position = [0] * len(lowered.programs)
        self._queues: list[dict[Hashable, deque[Send | Receive]]] = [defaultdict(deque) for _ in self._position]
        self._arrived: set[Message] = set()
        self._made: set[Message | None] = set()

    def finish(self) -> None:
        runnable = deque(range(len(self._position)))
        while runnable:
            rank = runnable.popleft()
            self._advance(rank)
            runnable.extend(self._match(rank))
        programs = self._lowered.programs
        ended = all(done == len(program) for done, program in zip(self._position, programs, strict=True))
        if not ended or any(any(queues.values()) for queues in self._queues):
            raise ScheduleError("check_rendezvous: deadlock\n  " + "\n  ".join(self._waits()))

    def _advance(self, rank: int) -> None:
        """Goes on with the program of a rank up to an action whose input has not come."""
        program, schedule = self._lowered.programs[rank], self._lowered.schedule
        while self._position[rank] < len(program):
            operation = program[self._position[rank]]
            if isinstance(operation, Action):
                needed = input_of(schedule, operation)
                if needed is not None and needed not in self._arrived:
                    return
                self._made.add(output_of(schedule, operation))
            else:
                if isinstance(operation, Send) and operation.message not in self._made:
                    raise ScheduleError(f"check_rendezvous: rank {rank}: {operation} comes before what makes it")
                self._queues[rank][self._channel(operation.message)].append(operation)
            self._position[rank] += 1

    def _match(self, rank: int) -> set[int]:
        """Ends what is first in line on both sides, as long as there is any; the ranks that this may let go on."""
        touched: set[int] = set()
        look = [rank]
        while look:
            for channel, queue in self._queues[look.pop()].items():
                while queue and self._meet(queue[0].message, channel):
                    message = queue[0].message
                    for end in (message.source, message.target):
                        self._queues[end][channel].popleft()
                        look.append(end)
                    self._arrived.add(message)
                    touched.add(message.target)
        return touched

    def _meet(self, message: Message, channel: Hashable) -> bool:
        """Whether a message is first in line at both its ends."""
        sender, receiver = (self._queues[end].get(channel) for end in (message.source, message.target))
        if not sender or not receiver:
            return False
        return sender[0] == Send(message) and receiver[0] == Receive(message)

    def _waits(self) -> list[str]:
        lines = []
        for rank, (done, program) in enumerate(zip(self._position, self._lowered.programs, strict=True)):
            operation = program[done] if done < len(program) else None
            needed = input_of(self._lowered.schedule, operation) if isinstance(operation, Action) else None
            if needed is not None:
                lines.append(f"rank {rank} at {operation} needs {needed} from rank {needed.source}")
        lines += [
            f"rank {rank} is held up in: {queue[0]}"
            for rank, queues in enumerate(self._queues)
            for queue in queues.values()
            if queue
        ]
        return lines
