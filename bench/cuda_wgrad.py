"""W of the CUDA extension beside torch's: one microbatch, four merged, and the host's share of a launch.

    python -m bench.cuda_wgrad

The peers are `torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)` for one microbatch, and four
of those for four. Every answer is held against the peer's before a time is printed. Random data; contestants in turn.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from bench import report
from zbkern import testing
from zbkern.kernels import cuda

SHAPES = [(4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192)]  # N, K
TOKENS = [1024, 2048, 4096, 8192]


def main() -> int:
    reason = cuda.why_not()
    if reason is not None:
        print(f"cannot run: {reason}")
        return 1
    rows, figures = [], []
    for n, k in SHAPES:
        for tokens in TOKENS:
            figures.append(compare(n, k, tokens))
            rows.append([figures[-1][column] for column in COLUMNS])
    print(report.table(list(COLUMNS), rows))
    microseconds = host_time()
    print(f"\nhost time of a launch: {microseconds:.1f} us")
    print(f"written to {report.write_json('cuda_wgrad', {'products': figures, 'host_us': microseconds})}")
    return 0


COLUMNS = ("N", "K", "tokens", "TFLOP/s", "of addmm", "merged 4, TFLOP/s", "of 4 addmm")


def compare(n: int, k: int, tokens: int) -> dict[str, float]:
    """Rates, and the peer's time over ours in the same round."""
    segments = [(operand(tokens, k), operand(tokens, n)) for _ in range(4)]
    ours, theirs = (torch.zeros(n, k, device="cuda") for _ in range(2))

    def addmm(count: int) -> None:
        for x, dy in segments[:count]:
            torch.addmm(theirs, dy.t(), x, out_dtype=torch.float32, out=theirs)

    def wgrad(count: int) -> None:
        cuda.linear_wgrad(segments[:count], (ours, None), True)

    wgrad(4), addmm(4)
    testing.assert_close(ours, theirs, f"dweight [{n}, {k}] of 4 x {tokens} tokens")
    candidates = {"ours": lambda: [lambda: wgrad(1)], "addmm": lambda: [lambda: addmm(1)],
                  "merged": lambda: [lambda: wgrad(4)], "four": lambda: [lambda: addmm(4)]}  # fmt: skip
    times = testing.measure(candidates, rounds=30, device="cuda")
    flops = testing.linear_flops(tokens, k, n) / 1e12
    return {
        "N": n,
        "K": k,
        "tokens": tokens,
        "TFLOP/s": round(flops / times["ours"].median),
        "of addmm": round(times["addmm"].ratio(times["ours"]), 3),
        "merged 4, TFLOP/s": round(4 * flops / times["merged"].median),
        "of 4 addmm": round(times["four"].ratio(times["merged"]), 3),
    }


def host_time(count: int = 2000) -> float:
    """Microseconds of the calling thread for a launch with four segments, the queue of the GPU never full."""
    segments = [(operand(64, 256), operand(64, 256)) for _ in range(4)]
    dweight = torch.zeros(256, 256, device="cuda")
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count // 10):
            cuda.linear_wgrad(segments, (dweight, None), True)
        best = min(best, (time.perf_counter() - begin) / (count // 10))
    return best * 1e6


def operand(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
