"""W of the CUDA extension beside torch's: one microbatch, four merged, a layer's weights at once, the host's share.

    python -m bench.cuda_wgrad

The peers are `torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)` for one microbatch, and four
of those for four; Triton's kernel is timed beside them, and the extension's with stores that add ("reduce"), for which
arithmetic says that it gains at 2048 tokens and fewer. Every result is compared with the peer's before a time is
printed. Random data; contestants in turn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench import report
from zbkern import testing
from zbkern.kernels.cuda import wgrad as cuda_wgrad
from zbkern.kernels.triton import kernels as triton_kernels
from zbkern.reporting import markdown_table

SHAPES = [(4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192)]  # N, K
TOKENS = [512, 1024, 2048, 4096, 8192]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    report.add_out(parser)
    arguments = parser.parse_args()
    reason = cuda_wgrad.why_not()
    if reason is not None:
        print(f"cannot run: {reason}")
        return 2
    figures = []
    for n, k in SHAPES:
        for tokens in TOKENS:
            figures.append(compare(n, k, tokens))
    print(markdown_table(list(figures[0]), [list(row.values()) for row in figures]))
    together = [layer(hidden, tokens) for hidden in (2048, 4096) for tokens in TOKENS]
    print("\n" + markdown_table(list(together[0]), [list(row.values()) for row in together]))
    microseconds = host_time()
    print(f"\nhost time of a call: {microseconds:.1f} us")
    everything = {"products": figures, "layers": together, "host_us": microseconds}
    print(report.write_json("cuda_wgrad", everything, arguments.out))
    return 0


def compare(n: int, k: int, tokens: int) -> dict[str, float | str]:
    """Rates, and the time of a peer over that of the extension in the same round."""
    segments = [(operand(tokens, k), operand(tokens, n)) for _ in range(4)]
    ours, theirs = (torch.zeros(n, k, device="cuda") for _ in range(2))

    def addmm(count: int) -> None:
        for x, dy in segments[:count]:
            torch.addmm(theirs, dy.t(), x, out_dtype=torch.float32, out=theirs)

    kernels: dict[str, Callable[..., None]] = {
        "cuda": cuda_wgrad.linear_wgrad,
        "reduce": partial(cuda_wgrad.linear_wgrad, reduce=True),
        "triton": triton_kernels.linear_wgrad,
    }

    def run(name: str, count: int) -> None:
        kernels[name](segments[:count], (ours, None), True)

    addmm(4)
    for kernel in kernels:
        ours.zero_()
        run(kernel, 4)
        name = f"{kernel}: dweight [{n}, {k}] of 4 x {tokens} tokens"
        testing.assert_close(ours, theirs, name, terms=2 * 4 * tokens)  # tensor cores cut off both

    def candidate(name: str, count: int) -> Callable[[], list[Callable[[], None]]]:
        return lambda: [lambda: addmm(count) if name == "torch" else run(name, count)]

    candidates = {(name, count): candidate(name, count) for name in (*kernels, "torch") for count in (1, 4)}
    times = testing.measure(candidates, rounds=30, device="cuda")
    flops = testing.linear_flops(tokens, k, n) / 1e12
    figures: dict[str, float | str] = {"N": n, "K": k, "tokens": tokens}
    for count, of in ((1, ""), (4, " of 4")):
        ours_now = times["cuda", count]
        figures[f"TFLOP/s{of}"] = round(count * flops / ours_now.median)
        figures[f"addmm{of}"] = round(times["torch", count].ratio(ours_now), 3)
        for other in ("triton", "reduce"):
            figures[f"{other}{of}"] = round(times[other, count].ratio(ours_now), 3)
        figures[f"fastest{of}"] = min(kernels, key=lambda name: times[name, count].median)
    return figures


def layer(hidden: int, tokens: int) -> dict[str, float]:
    """The four weights of a transformer's layer in one kernel, compared with a kernel each."""
    shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    operands = [[(operand(tokens, k), operand(tokens, n))] for n, k in shapes]
    once, each = ([(o, (torch.zeros(n, k, device="cuda"), None)) for o, (n, k) in zip(operands, shapes, strict=True)]
                  for _ in range(2))  # fmt: skip

    def one_kernel() -> None:
        cuda_wgrad.linear_wgrads(once, True)

    def four_kernels() -> None:
        for segments, outputs in each:
            cuda_wgrad.linear_wgrad(segments, outputs, True)

    one_kernel(), four_kernels()
    for (_, (got, _)), (_, (expected, _)) in zip(once, each, strict=True):
        testing.assert_close(got, expected, f"a layer of {hidden}, {tokens} tokens", terms=2 * tokens)
    times = testing.measure({"one": lambda: [one_kernel], "four": lambda: [four_kernels]}, rounds=30, device="cuda")
    flops = sum(testing.linear_flops(tokens, k, n) for n, k in shapes) / 1e12
    return {
        "hidden": hidden,
        "tokens": tokens,
        "one kernel, TFLOP/s": round(flops / times["one"].median),
        "of four kernels": round(times["four"].ratio(times["one"]), 3),
    }


def host_time(count: int = 2000) -> float:
    """Microseconds of the calling thread for a call with four segments, while the GPU's queue is never full."""
    segments = [(operand(64, 256), operand(64, 256)) for _ in range(4)]
    dweight = torch.zeros(256, 256, device="cuda")
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count // 10):
            cuda_wgrad.linear_wgrad(segments, (dweight, None), True)
        best = min(best, (time.perf_counter() - begin) / (count // 10))
    return best * 1e6


def operand(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
