"""What calling a W costs the host, by how many sets of addresses take turns: over a driver that does nothing.

    python -m bench.host_launch [--sets 100 10000] [--rounds 5]

No GPU is needed: kernels are compiled for 9.0, and a driver of the tests checks every launch. That a real driver takes
longer for one is not in these figures; they are processor time of this process, and the least of the rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ["TRITON_INTERPRET"] = "0"

import torch

from tests.emulator.gpu import gpu

SIZE = 64


def measure(sets: int, rounds: int) -> float:
    """Microseconds of a W of [64, 64] that is added to float32, each call at the next of so many addresses."""
    from zbkern.kernels.triton import kernels

    x, dy = torch.zeros(2, sets, SIZE, SIZE, dtype=torch.bfloat16)
    dweight = torch.zeros(SIZE, SIZE)
    segments = list(zip(x.unbind(), dy.unbind(), strict=True))
    turns = -(-10_000 // sets)

    def once() -> float:
        begin = time.process_time()
        for _ in range(turns):
            for segment in segments:
                kernels.linear_wgrad([segment], (dweight, None), True)
        return (time.process_time() - begin) / turns / sets * 1e6

    return min(once() for _ in range(rounds))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sets", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    with gpu(90, runs=False):
        from zbkern.kernels.triton.replay import replay

        with replay.paused():
            print(f"worked out anew each time: {measure(100, 1):.1f} us", flush=True)
        found = [(sets, measure(sets, arguments.rounds)) for sets in arguments.sets]
    (sets, first), *others = found
    print(f"W call {first:.1f} us at {sets} address sets" + "".join(f", {us:.1f} us at {n}" for n, us in others))
    return 0


if __name__ == "__main__":
    sys.exit(main())
