from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import PRELOAD
from zbkern.pipeline import Optimizer, Pipeline, PipelineError, ScheduleError, schedules
from zbkern.pipeline.transport.base import Tag
from zbkern.pipeline.transport.distributed import DistributedTransport


class Both(NamedTuple):
    hidden: torch.Tensor
    mask: torch.Tensor | None


def message() -> dict[str, Any]:
    both = Both(torch.arange(6.0).view(2, 3), None)
    return {"both": both, "rest": [torch.zeros(0), (torch.ones(2, dtype=torch.bool),)], "nothing": ()}


def exchange() -> tuple[Any, list[str]]:
    """What rank 1 got from rank 0, and the warnings of both of its threads."""
    rank, tag = dist.get_rank(), Tag(0, "F", 1, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transport = DistributedTransport(None)
        if rank == 0:
            transport.send(1, tag, message())
        received = transport.receive(0, tag, 30) if rank == 1 else None
        transport.close()
    return received, [str(warning.message) for warning in caught]


def test_a_tree_of_tensors_arrives_as_it_was_without_a_warning(two_ranks: Any) -> None:
    (_, first), (received, second) = two_ranks.run(exchange)
    assert first == second == []
    expected = message()
    assert received.keys() == expected.keys()
    assert isinstance(received["both"], Both)
    assert torch.equal(received["both"].hidden, expected["both"].hidden)
    assert received["both"].mask is None
    assert [type(part) for part in received["rest"]] == [torch.Tensor, tuple]
    assert torch.equal(received["rest"][1][0], expected["rest"][1][0])
    assert received["nothing"] == ()


def open_and_close() -> list[tuple[int, int]]:
    """File descriptors and threads of this process after each of several transports."""
    counts = []
    for number in range(4):
        transport = DistributedTransport(None)
        other = 1 - transport.rank
        transport.send(other, Tag(0, "F", number, 0), torch.full((2,), float(number)))
        assert transport.receive(other, Tag(0, "F", number, 0), 30).tolist() == [number] * 2
        transport.close()
        del transport
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="file descriptors are counted in /proc")
def test_a_closed_transport_leaves_no_connection_and_no_thread(two_ranks: Any) -> None:
    for counts in two_ranks.run(open_and_close):
        assert max(counts[1:]) <= counts[0]


def construct_pipeline() -> None:
    schedule = schedules.zb_h1(2, 4 + dist.get_rank())
    with pytest.raises(ScheduleError):
        Pipeline(torch.nn.Linear(2, 2), schedule, torch.nn.functional.mse_loss)


class Unordered(str):
    """A name that passes for one until the ranks are connected and it is sorted."""

    def __lt__(self, other: str) -> bool:
        raise TypeError("names have no order")


def construct_optimizer() -> None:
    tied = {Unordered("a"): torch.ones(2), Unordered("b"): torch.ones(2)} if dist.get_rank() else {}
    error = TypeError if tied else PipelineError
    with pytest.raises(error, match="names have no order"):
        Optimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()), tied=tied)


def construct_another_optimizer() -> None:
    """With a Pipeline, whose ranks hear why one of them has none."""
    wrong = dist.get_rank() == 1
    module = torch.nn.Linear(2, 2)
    pipe = Pipeline(module, schedules.zb_h1(2, 4), torch.nn.functional.mse_loss)
    with pytest.raises(TypeError if wrong else PipelineError, match=r"must be a torch.optim.Optimizer.*got int"):
        Optimizer(3 if wrong else torch.optim.SGD(module.parameters()), pipe)  # type: ignore[arg-type]
    with contextlib.suppress(PipelineError):
        pipe.close()


def construct_in_vain(construct: Callable[[], None]) -> list[tuple[int, int]]:
    """File descriptors and threads of this process after two constructors that fail, and after six."""
    counts = []
    for number in range(6):
        construct()
        gc.collect()
        if number in (1, 5):
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="file descriptors are counted in /proc")
@pytest.mark.parametrize("construct", [construct_pipeline, construct_optimizer, construct_another_optimizer])
def test_a_constructor_that_fails_leaves_no_connection_and_no_thread(two_ranks: Any, construct: Any) -> None:
    for first, last in two_ranks.run(construct_in_vain, construct):
        assert max(last[0] - first[0], last[1] - first[1]) <= 0


def end_with_an_error(rank: int, port: int, folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    pipe = Pipeline(torch.nn.Linear(2, 2), schedules.zb_h1(3, 4), torch.nn.functional.mse_loss)
    try:
        pipe.gather(rank if rank != 1 else 1 / 0)
    except PipelineError as error:
        (folder / str(rank)).write_text(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("of_torch", [False, True])
def test_a_process_of_multiprocessing_says_why_before_it_ends(of_torch: bool, tmp_path: Path) -> None:
    """It has no atexit, and torch's ends by SystemExit."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = store.port, tmp_path
    if of_torch:
        ranks = torch.multiprocessing.start_processes(
            end_with_an_error, arguments, 3, join=False, start_method="forkserver"
        ).processes
    else:
        ranks = [context.Process(target=end_with_an_error, args=(rank, *arguments)) for rank in range(3)]
        for process in ranks:
            process.start()
    for process in ranks:
        process.join(60)
    for rank in (0, 2):
        assert (tmp_path / str(rank)).read_text() == "rank 1: ZeroDivisionError: division by zero"


ENDINGS = """
import builtins, json, os, signal, sys, time
import torch, torch.distributed as dist
from zbkern.pipeline import Pipeline, schedules
from zbkern.pipeline.transport import distributed

class Last:
    def __del__(self, mkdir=os.mkdir, ends=sys.argv[1] + "/ends", sleep=time.sleep):  # while Python ends
        mkdir(ends)
        sleep(1)

places = [(what, rank) for what in ("leaves first", "raises", "SIGKILL", "SIGSTOP") for rank in range(2)]
processes, found = {}, {}
for place in places:
    if (process := os.fork()) == 0:
        break
    processes[process] = place
else:
    while len(found) < len(places):
        process, status = os.wait()
        what, rank = processes[process]
        found[f"{what} {rank}"] = os.waitstatus_to_exitcode(status), time.time()
        if (what, rank) == ("SIGSTOP", 0):
            os.kill(next(each for each in processes if processes[each] == (what, 1)), signal.SIGKILL)
    print(json.dumps(found))
    os._exit(0)

(what, rank), folder = place, sys.argv[1]
os.dup2(os.open(f"{folder}/{what} {rank}.said", os.O_WRONLY | os.O_CREAT), 2)
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{what}", 2), rank=rank, world_size=2)
if what == "leaves first":
    distributed._TOGETHER = 0.1
    transport = distributed.DistributedTransport(None)
    if rank == 0:
        builtins.last = Last()
    else:
        while not os.path.exists(folder + "/ends"):
            time.sleep(0.01)
        os._exit(0)  # closes the connections
else:
    pipe = Pipeline(torch.nn.Linear(2, 2), schedules.zb_h1(2, 4), torch.nn.functional.mse_loss)
    if what == "raises":
        pipe.gather(1 if rank == 0 else 1 / 0)
    pipe.step(torch.ones(4, 2), torch.ones(4, 2))
    if rank == 1:
        dist.distributed_c10d._get_default_store().set("process", str(os.getpid()))
    pipe.gather(rank)
    told, state = f"{folder}/{what} has all", lambda: open(f"/proc/{peer}/stat").read().split(") ")[1][0]
    if rank == 1:
        while not os.path.exists(told):  # messages have left
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, what))
    os.mkdir(told)
    peer = int(dist.distributed_c10d._get_default_store().get("process"))
    while os.path.exists(f"/proc/{peer}") and state() not in "TZ":
        time.sleep(0.01)
    open(f"{folder}/{what} ends", "w").write(str(time.time()))
"""


@pytest.mark.slow
def test_a_process_ends_well_whatever_its_peer_does(tmp_path: Path) -> None:
    """As Python ends one: each is forked from one that has imported torch, and ends with its script.

    It does not abort where its peer ends long before, or while Python ends. It ends soon though the peer is gone or
    frozen, and the error that its script ends with reaches the peer.
    """
    command = [sys.executable, "-c", ENDINGS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as forks:
        try:
            found = json.loads(forks.communicate(timeout=150)[0])
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(forks.pid, signal.SIGKILL)
    codes = {place: code for place, (code, _) in found.items()}
    assert [codes[f"leaves first {rank}"] for rank in range(2)] == [0, 0]
    assert [codes[f"raises {rank}"] for rank in range(2)] == [1, 1]
    for what in ("SIGKILL", "SIGSTOP"):
        assert [codes[f"{what} {rank}"] for rank in range(2)] == [0, -signal.SIGKILL]
        assert found[f"{what} 0"][1] - float((tmp_path / f"{what} ends").read_text()) < 60
    said = (tmp_path / "raises 0.said").read_text()
    assert "PipelineError: rank 1: ZeroDivisionError: division by zero" in said
