"""Every attention core that this GPU can run, forward and backward, in one process.

    python -m bench.attention

Each result is compared with torch's own attention in float32 before a time is printed. Random data; cores in turn. The
fastest core of each case comes first: what `ORDER` in ops/functions/attention_backends.py should say of such a GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import ahead, report
from zbkern import testing
from zbkern.kernels import dispatch
from zbkern.kernels.spec import AttentionOptions
from zbkern.ops.functions import attention_backends as paths
from zbkern.ops.functions.attention import attention_with_torch
from zbkern.reporting import markdown_table

COLUMNS = ("tokens", "head", "causal", "core", "forward TFLOP/s", "backward TFLOP/s", "of torch's choice")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="of a sequence")
    parser.add_argument("--total", type=int, default=16384, help="tokens of a batch")
    parser.add_argument("--width", type=int, default=2048, help="heads times head size")
    parser.add_argument("--rounds", type=int, default=10)
    report.add_out(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("cannot run: no GPU is visible")
        return 1
    figures = []
    cases = list(itertools.product(arguments.tokens, (64, 128, 256), (False, True)))
    shapes = [
        (max(1, arguments.total // tokens), tokens, max(1, arguments.width // size), size) for tokens, size, _ in cases
    ]
    with ahead.Compilers() as compilers:
        compilers.compile(functools.partial(ours, shape, case[-1]) for shape, case in zip(shapes, cases, strict=True))
    for shape, (_, _, causal) in zip(shapes, cases, strict=True):
        figures += compare(shape, causal, arguments.rounds)
    print(markdown_table(list(COLUMNS), [[row[column] for column in COLUMNS] for row in figures]))
    print(report.write_json("attention", figures, arguments.out))
    return 0


def ours(shape: Sequence[int], causal: bool, device: str = "cuda") -> None:
    """Our kernels' forward and backward once, for the compilers."""
    backend = dispatch.resolve("attention", "triton", device, torch.bfloat16)
    leaves = [torch.zeros(*shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    y = paths.through("triton", paths.Case(*leaves, options_of(shape, causal), None, backend))
    torch.autograd.grad(y, leaves, torch.zeros_like(y))


def options_of(shape: Sequence[int], causal: bool) -> AttentionOptions:
    batch, tokens, _, size = shape
    ends = tuple(range(0, (batch + 1) * tokens, tokens))
    return AttentionOptions(size**-0.5, causal, None, ends, ends)


def compare(shape: Sequence[int], causal: bool, rounds: int, device: str = "cuda") -> list[dict[str, Any]]:
    """One row per core that can run it, the fastest at forward and backward together first."""
    batch, tokens, _, size = shape
    q, k, v, dy = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    options = options_of(shape, causal)
    runs = dispatch.why_not("attention", "triton", device, q.dtype) is None
    backend = dispatch.resolve("attention", "triton", device, q.dtype) if runs else None
    leaves = [t.requires_grad_() for t in (q, k, v)]
    case = paths.Case(*leaves, options, None, backend)
    names = paths.cores(case)

    def forward(name: str) -> Callable[[], Tensor]:
        return lambda: paths.through(name, case)

    def backward(name: str) -> list[Callable[[], object]]:
        y = forward(name)()
        return [lambda: torch.autograd.grad(y, leaves, dy)]

    few = [t[:1].detach().float().requires_grad_() for t in leaves]
    one = options_of((1, *shape[1:]), causal)
    expected = attention_with_torch(None, *few, one)
    gradients = torch.autograd.grad(expected, few, dy[:1].float())
    for name in list(names):
        try:
            y = forward(name)()
            for got, wanted in zip((y, *torch.autograd.grad(y, leaves, dy)), (expected, *gradients), strict=True):
                testing.assert_close(got[:1], wanted, name)
        except Exception as error:  # the other cores still count
            print(f"{name} at {list(shape)}{' causal' * causal} cannot run: {error}", flush=True)
            names.remove(name)
    y = got = None  # or its graph stays while the others are timed
    times = testing.measure({name: lambda name=name: [forward(name)] for name in names}, rounds, device=device)
    after = testing.measure({name: lambda name=name: backward(name) for name in names}, rounds, device=device)
    flops = 4 * batch * shape[2] * tokens * tokens * size / (2 if causal else 1) / 1e12
    total = {name: times[name].median + after[name].median for name in names}
    return [
        {
            "tokens": tokens,
            "head": size,
            "causal": causal,
            "core": name,
            "forward TFLOP/s": round(flops / times[name].median, 1),
            "backward TFLOP/s": round(2.5 * flops / after[name].median, 1),
            "of torch's choice": round(total.get("torch", float("nan")) / total[name], 2),
        }
        for name in sorted(names, key=total.__getitem__)
    ]


if __name__ == "__main__":
    sys.exit(main())
