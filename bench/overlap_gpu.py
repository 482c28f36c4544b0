"""Passes beside each other on one GPU: bench.overlap's stage, whose all-to-alls are a wait on a communication stream.

One process has all: what would go to another rank stays here, and comes when a stream of its own has copied it and then
slept for the latency, one all-to-all after the other. So turns, events, the host's wait for the numbers of tokens and W
on the current stream are those of several ranks, and all ways compute the same: their gradients are compared.

    python -m bench.overlap_gpu [--microbatches 8] [--rounds 5] [--out FOLDER]
    python -m bench.overlap_gpu --tiny              # on a CPU: the same program, whose times mean nothing
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from bench import report
from bench.overlap import COLUMNS, EXPERT_RANKS, LAYERS, Contest, Layer, last_line, pipeline_of, ways_of
from bench.overlap_asleep import Lane
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.reporting import environment, machine_line

WIDTH, TOKENS = 2048, 8192
TINY = 16, 32
CYCLES = 10_000_000  # of a sleep that is timed


class Alone(zbkern.nn.ExpertParallel):
    """Of a group whose other ranks are this one."""

    collective_forward = False

    def _ranks(self) -> int:
        return EXPERT_RANKS


class Network:
    """torch's all_to_all_single within a rank. It ends `latency` seconds after its start, and after those before it."""

    def __init__(self, device: torch.device) -> None:
        self.latency, self.count, self._lane = 0.0, 0, Lane()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._rate = 0.0 if self._stream is None else _cycles_of_a_second()
        dist.all_to_all_single = self.all_to_all_single

    def all_to_all_single(self, output: Tensor, given: Tensor, *_: Any, **__: Any) -> Any:
        self.count += 1
        if self._stream is None:
            output.copy_(given)
            return _Slept(self._lane.start(self.latency))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            output.copy_(given)
            torch.cuda._sleep(int(self.latency * self._rate))
            return _Streamed(given, self._stream.record_event())


class _Slept:
    def __init__(self, end: float) -> None:
        self._end = end

    def wait(self) -> None:
        time.sleep(max(0.0, self._end - time.perf_counter()))

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._end


class _Streamed:
    """given: is not freed before the stream has read it."""

    def __init__(self, given: Tensor, event: torch.cuda.Event) -> None:
        self._given, self._event = given, event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


def _cycles_of_a_second() -> float:
    torch.cuda._sleep(CYCLES)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    end.synchronize()
    return 1e3 * CYCLES / begin.elapsed_time(end)


def measure(device: torch.device, width: int, tokens: int, microbatches: int, rounds: int) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    xs = [torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(microbatches)]
    ways, pipes, layers = ways_of(1, microbatches), [], []
    for way in ways:
        torch.manual_seed(1)
        with device:
            part = nn.Sequential(*(Layer(width=width, kind=Alone) for _ in range(LAYERS))).to(dtype)
        pipes.append(pipeline_of(way, [part], LocalTransport.ring(1)[0]))
        layers.append(dict(enumerate(part)))
    ready = torch.cuda.synchronize if device.type == "cuda" else int
    rows = Contest(ways, pipes, layers, xs, Network(device), ready).rows(rounds)
    for pipe in pipes:
        pipe.close()
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU, to see that it runs")
    report.add_out(parser)
    o = parser.parse_args(arguments)
    if not o.tiny and not torch.cuda.is_available():
        print("cannot run: torch sees no CUDA device (--tiny tries the program without one)")
        return 2
    device = torch.device("cpu" if o.tiny else "cuda")
    width, tokens = TINY if o.tiny else (WIDTH, TOKENS)
    found = measure(device, width, tokens, o.microbatches, 1 if o.tiny else o.rounds)
    print(machine_line(environment()), end="\n\n")
    title = f"{LAYERS} expert-parallel layers of width {width}, {o.microbatches} microbatches of {tokens} tokens"
    print(report.table(title, COLUMNS, found))
    print("\n" + report.write_json("overlap_gpu", found, o.out))
    print(last_line(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
