"""zbkern's pipelines over the stand-in for NCCL: ranks are threads, whose transport takes its GPU branches.

`Run(ranks, queues, seed).run(function)` calls function(transport) on each rank. The transport is zbkern's own; passes
compute on the CPU, at once, and take time on the rank's GPU. What a tensor holds before the stream that reads it waits
for its receive is NaN. Reading a number (`tolist`, `item`) waits for the GPU.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.nccl_standin.communicators import Gloo, Nccl, Network
from tests.nccl_standin.gpu import Event, Gpu, Stream
from tests.nccl_standin.scheduler import Modules, Scheduler
from zbkern.pipeline.runtime.slices import comparison
from zbkern.pipeline.transport import base, distributed, mailbox
from zbkern.pipeline.transport import gpu as gpu_transport
from zbkern.pipeline.transport.gpu import GpuTransport
from zbkern.pipeline.transport.mailbox import PipelineError, described

MEETING = 30.0  # seconds that ranks wait for each other to connect
PASS = 2e-4  # seconds that a pass takes on a GPU, on average
_REAL = {name: getattr(Tensor, name) for name in ("tolist", "item", "record_stream")}


class Run:
    """queues: CUDA_DEVICE_MAX_CONNECTIONS. on_call(rank, what): before every call of NCCL, and inside, for faults."""

    def __init__(
        self,
        ranks: int,
        queues: int = 32,
        seed: int = 0,
        strict: bool = False,
        on_call: Callable[[int, str], None] = lambda rank, what: None,
    ) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler)
        self.gpus = [Gpu(self.scheduler, queues, strict) for _ in range(ranks)]
        self.communicators: list[Nccl] = []
        self.meeting = _Meeting(self.scheduler, ranks)
        self.on_call = on_call
        self.pace = self.scheduler.random.choice([0.1, 1.0, 5.0])  # of the GPU beside its host
        ahead = self.scheduler.random.random() < 0.5  # hosts go on where their GPUs wait, or not
        for gpu in self.gpus:
            gpu.is_behind = ahead

    def run(self, function: Callable[[Any], Any], seconds: float = 3600.0) -> list[Any]:
        """What it returned or raised on each rank; None of one that was killed or is frozen."""
        results: list[Any] = [None] * len(self.gpus)

        def call(rank: int) -> None:
            try:
                results[rank] = function(StandIn(self))
            except Exception as error:
                results[rank] = error

        with self._installed():
            for rank in range(len(self.gpus)):
                self.scheduler.spawn(rank, f"rank {rank}", lambda rank=rank: call(rank), waited_for=True)  # type: ignore[misc]
            self.scheduler.run(seconds)
        assert not self.scheduler.errors, self.scheduler.errors
        return results

    def errors(self) -> list[str]:
        """What real GPUs would have got wrong in silence."""
        for gpu in self.gpus:
            gpu.check_memory()
        return [f"rank {rank}: {error}" for rank, gpu in enumerate(self.gpus) for error in gpu.errors]

    # ---- faults

    def kill(self, rank: int) -> None:
        """Its process ends, in the middle of the call of its that is running."""
        self.gpus[rank].dead = True
        self.network.kill(rank)
        self.scheduler.kill(rank)

    def freeze(self, rank: int) -> None:
        """Its process is stopped; its GPU goes on, and its connections stay."""
        self.scheduler.kill(rank)

    # ---- what zbkern finds in the place of torch and threading

    @property
    def gpu(self) -> Gpu:
        """Of the calling thread."""
        return self.gpus[self.scheduler.current.rank]

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self.scheduler.current.local, "stream", self.gpu.default)

    @contextlib.contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        local, before = self.scheduler.current.local, self.current_stream()
        local.stream = stream
        yield
        local.stream = before

    def new_nccl(self, ranks: Sequence[int]) -> Nccl:
        rank = self.scheduler.current.rank
        made = Nccl(self.network, rank, self.gpu, self.current_stream, lambda what: self.on_call(rank, what))
        self.communicators.append(made)
        return made

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        cuda = SimpleNamespace(
            Stream=lambda device=None: self.gpu.stream(),
            Event=Event,
            current_stream=self.current_stream,
            stream=self._use,
            device=lambda device: contextlib.nullcontext(),
        )
        modules = Modules(self.scheduler)
        of_transport = {
            "torch": _Torch(cuda),
            "threading": modules.threading,
            "queue": modules.queue,
            "time": modules.time,
            "Finalize": lambda *_, **__: SimpleNamespace(cancel=lambda: None),
            "dist": SimpleNamespace(
                get_rank=lambda _: self.scheduler.current.rank,
                get_world_size=lambda _: len(self.gpus),
                get_process_group_ranks=lambda _: [*range(len(self.gpus))],
                group=SimpleNamespace(WORLD=None),
            ),
            "new_communicator": lambda ranks: Gloo(self.network, self.scheduler.current.rank),
            "new_nccl": self.new_nccl,
            "check_backend": lambda group: None,
            "close_nccl": _close_nccl,
            "_meeting": lambda group: self.meeting,
            "rendezvous_timeout": lambda: MEETING,
        }

        def waiting(name: str) -> Callable[[Tensor], Any]:
            def read(tensor: Tensor) -> Any:
                if self.scheduler._current is not None and not self.scheduler.is_over:
                    self.current_stream().synchronize()
                return _REAL[name](tensor)

            return read

        with contextlib.ExitStack() as stack:
            for module, (name, value) in itertools.product((distributed, gpu_transport), of_transport.items()):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
            stack.enter_context(mock.patch.object(mailbox, "threading", modules.threading))
            stack.enter_context(mock.patch.object(base, "time", modules.time))
            # a rank that has it gives its turn away where it reads a number
            stack.enter_context(mock.patch.object(comparison, "_one_at_a_time", modules.threading.Lock()))
            for name in ("tolist", "item"):
                stack.enter_context(mock.patch.object(Tensor, name, waiting(name)))
            stack.enter_context(
                mock.patch.object(
                    Tensor, "record_stream", lambda tensor, stream: stream.gpu.record_stream(tensor, stream)
                )
            )
            yield


class _Torch(ModuleType):
    """torch, with another torch.cuda, whose memory is the CPU's."""

    def __init__(self, cuda: Any) -> None:
        super().__init__("torch")
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, device: Any = None, **rest: Any) -> Tensor:
        return torch.empty(*size, **rest)


def _close_nccl(groups: Sequence[Nccl | None], abort: bool = False) -> None:
    for group in groups:
        if group is not None:  # it was closed before
            group.abort() if abort else group.shutdown()


class _Meeting:
    """What a RankExchange does over torch's store: ranks wait for each other, and an error reaches all."""

    def __init__(self, scheduler: Scheduler, ranks: int) -> None:
        self._scheduler, self.size = scheduler, ranks
        self._come: dict[tuple[int, int], set[int]] = {}
        self._failed: dict[int, str] = {}
        self._openings: dict[int, int] = {}
        self._stages: dict[int, int] = {}
        self._waiting: list[Any] = []

    def __enter__(self) -> _Meeting:
        rank = self._scheduler.current.rank
        self._openings[rank] = self._openings.get(rank, 0) + 1
        self._stages[rank] = 0
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not self._scheduler.is_over:
            rank = self._scheduler.current.rank
            self._failed.setdefault(self._openings[rank], f"Pipeline: rank {rank}: {described(error)}")
            self._scheduler.wake(self._waiting)

    def exchange(self, stage: str) -> None:
        rank = self._scheduler.current.rank
        opening = self._openings[rank]
        self._stages[rank] += 1
        here = self._come.setdefault((opening, self._stages[rank]), set())
        here.add(rank)
        self._scheduler.wake(self._waiting)
        end = self._scheduler.now + MEETING
        done = lambda: len(here) == self.size or opening in self._failed  # noqa: E731
        if not self._scheduler.wait_until(self._waiting, done, end - self._scheduler.now):
            missing = [rank for rank in range(self.size) if rank not in here]
            self._failed.setdefault(opening, f"Pipeline: ranks {missing} did not come to {stage!r}")
            self._scheduler.wake(self._waiting)
        if opening in self._failed:
            raise PipelineError(self._failed[opening])


class StandIn(GpuTransport):
    """zbkern's own transport on a GPU that is not there. A pass takes time on it: what is between two messages."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._passes = False
        super().__init__(None, SimpleNamespace(type="cuda", index=0))  # type: ignore[arg-type]

    def _settle(self, message: Any, works: Sequence[Any]) -> None:
        super()._settle(message, works)
        if not self.run.gpu.is_behind:
            self.run.current_stream().synchronize()

    def begin_action(self, action: object) -> None:
        self._end_pass()
        self._passes = action != "none"
        super().begin_action(action)

    def send(self, peer: int, tag: Any, message: Any) -> None:
        self._end_pass()
        super().send(peer, tag, message)

    def _end_pass(self) -> None:
        if self._passes:
            seconds = self.run.scheduler.random.uniform(0.5, 1.5) * PASS * self.run.pace
            self.run.current_stream().compute(seconds)
        self._passes = False
