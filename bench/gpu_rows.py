"""What `bench.gpu` measures: for every row the shapes, our kernels, those of peers, and a check that they agree."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import gpu_peers
from bench import gpu_rows_memory as memory
from bench.gpu_case import Bench, Case, Row, Run
from bench.gpu_rows_memory import backward_of
from bench.gpu_rows_w import (
    experts,
    grouped_weight_gradient,
    host_time,
    large_weight_gradient,
    merged,
    weight_gradient,
    whole_layer,
)
from zbkern import testing
from zbkern.kernels import reference, spec

DECIDED = (1.05, 1.10)
"""Goals of a fused kernel beside a library's product and a pass over its result: one that gains less goes."""


def ceilings(bench: Bench) -> Iterator[Case]:
    """The two roofs: a large product by torch, and a copy."""
    n = bench.sizes.square
    a, b, out = bench.random(n, n), bench.random(n, n), bench.empty(n, n)
    yield Case(f"torch.mm {n}^3", lambda: torch.mm(a, b, out=out), {}, lambda: None, 2 * n**3)


def _linear(bench: Bench, dgrad: bool, m: int, n: int, k: int) -> Case:
    """y [M, N] = x weight^T, or dx [M, K] = dy weight, beside cuBLAS."""
    backend, (inner, outer) = bench.backend("linear"), (n, k) if dgrad else (k, n)
    rows, weight, out, other = (bench.random(*s) for s in ((m, inner), (n, k), (m, outer), (m, outer)))

    def ours() -> None:
        backend.linear_dgrad(rows, weight, out) if dgrad else backend.linear_fwd(rows, weight, None, out)

    def library() -> None:
        torch.mm(rows, weight if dgrad else weight.t(), out=other)

    def check() -> None:
        library()
        testing.assert_close(out, other, "dx" if dgrad else "y")

    return Case(
        f"M={m} N={n} K={k}",
        ours,
        {"cuBLAS": library},
        check,
        testing.linear_flops(m, k, n),
        0.90,
        1.00,
    )


def linears(bench: Bench, dgrad: bool) -> Iterator[Case]:
    for m, (n, k) in itertools.product(bench.sizes.tokens, bench.sizes.layers):
        yield _linear(bench, dgrad, m, n, k)


def grouped_forward(bench: Bench) -> Iterator[Case]:
    backend = bench.backend("grouped_linear")
    (n, k), (counts, ends) = bench.sizes.layers[0], experts(bench)
    m, groups = sum(counts), len(counts)
    x, weight, ours = bench.random(m, k), bench.random(groups * n, k).view(groups, n, k), bench.empty(m, n)
    theirs: list[Tensor] = []

    def library() -> None:
        theirs[:] = [torch._grouped_mm(x, weight.mT, ends)]

    def loop() -> None:
        theirs[:] = [torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(counts), weight, strict=True)])]

    def check() -> None:
        backend.grouped_linear_fwd(x, weight, None, ends, ours)
        loop()
        testing.assert_close(ours, theirs[0], "y")

    yield Case(
        f"{groups} groups T={m} N={n} K={k}",
        lambda: backend.grouped_linear_fwd(x, weight, None, ends, ours),
        {"one by one": loop, "torch._grouped_mm": library},
        check,
        testing.linear_flops(m, k, n),
        1.0,
        1.1,
        "torch._grouped_mm",
    )


def _gated_forward(bench: Bench, m: int) -> Case:
    backend, (k, h) = bench.backend("gated_mlp"), bench.sizes.hidden
    x, weights = bench.random(m, k), [bench.random(h, k, scale=k**-0.5) for _ in range(2)]
    ours, theirs = ([bench.empty(m, h) for _ in range(3)] for _ in range(2))

    def two() -> None:
        for weight, out in zip(weights, theirs, strict=False):
            torch.mm(x, weight.t(), out=out)
        backend.gated_fwd(*theirs[:2], "silu", theirs[2])

    def check() -> None:
        two()
        for name, got, wanted in zip(("gate", "up", "h"), ours, theirs, strict=True):
            testing.assert_close(got, wanted, name, bench.tolerance)

    peers: dict[str, Run] = {
        "cuBLAS, then our gate": two,
        "reference": lambda: reference.gated_linear_fwd(x, *weights, None, None, "silu", *theirs),
    }
    return Case(
        f"M={m} K={k} H={h}",
        lambda: backend.gated_linear_fwd(x, *weights, None, None, "silu", *ours),
        peers,
        check,
        2 * testing.linear_flops(m, k, h),
        *DECIDED,
    )


def gated_forward(bench: Bench) -> Iterator[Case]:
    for m in bench.sizes.tokens:
        yield _gated_forward(bench, m)


def _gated_dgrad(bench: Bench, m: int) -> Case:
    backend, (n, h) = bench.backend("gated_mlp"), bench.sizes.hidden
    dy, down, gate, up = bench.random(m, n), bench.random(n, h), bench.random(m, h), bench.random(m, h)
    ours, theirs = ([bench.empty(m, h) for _ in range(3)] for _ in range(2))
    dh = bench.empty(m, h)

    def two() -> None:
        torch.mm(dy, down, out=dh)
        backend.gated_bwd(dh, gate, up, "silu", *theirs)

    def check() -> None:
        two()
        for name, got, wanted in zip(("dgate", "dup", "h"), ours, theirs, strict=True):
            testing.assert_close(got, wanted, name, bench.tolerance)  # theirs rounds dh

    return Case(
        f"M={m} N={n} H={h}",
        lambda: backend.gated_linear_dgrad(dy, down, gate, up, "silu", *ours),
        {
            "cuBLAS, then our gate": two,
            "reference": lambda: reference.gated_linear_dgrad(dy, down, gate, up, "silu", *theirs),
        },
        check,
        testing.linear_flops(m, h, n),
        *DECIDED,
    )


def gated_dgrad(bench: Bench) -> Iterator[Case]:
    for m in bench.sizes.tokens:
        yield _gated_dgrad(bench, m)


def attention(bench: Bench, backward: bool) -> Iterator[Case]:
    backend = bench.backend("attention")
    heads, d, tokens = bench.sizes.heads
    q, k, v, dy = (bench.random(tokens, heads, d) for _ in range(4))
    y, gradients = torch.empty_like(q), [torch.empty_like(q) for _ in range(3)]
    lse = bench.zeros(heads, tokens)
    options = spec.AttentionOptions(d**-0.5, True, None, (0, tokens), (0, tokens))
    inputs = [t.unsqueeze(0).requires_grad_(backward) for t in (q, k, v)]
    functions = gpu_peers.attention(bench.device)
    backend.attention_fwd(*(t.detach() for t in (q, k, v)), options, y, lse)
    peers: dict[str, Run] = {}
    for name, function in functions.items():
        if backward:
            peers[name] = backward_of(lambda function=function: function(*inputs), inputs, dy.unsqueeze(0))
        else:
            peers[name] = lambda function=function: function(*inputs)
    first = next(iter(peers.values()))

    def ours() -> None:
        if backward:
            backend.attention_dgrad(dy, q, k, v, y, lse, options, *gradients)
        else:
            backend.attention_fwd(q, k, v, options, y, lse)

    def check() -> None:
        wanted = first()
        got = gradients if backward else [y]
        for index, (mine, other) in enumerate(zip(got, wanted if backward else [wanted], strict=True)):
            testing.assert_close(mine, other.squeeze(0), f"output {index}", bench.tolerance)

    flops = testing.attention_flops(1, heads, tokens, tokens, d, causal=True, backward=backward)
    goals = (250.0, 450.0) if backward else (400.0, 580.0)
    yield Case(f"heads={heads} d={d} T={tokens} causal", ours, peers, check, flops, *goals)


def linear_cross_entropy(bench: Bench) -> Iterator[Case]:
    """Loss, dx and dweight of the output layer: three products count, whatever is computed twice."""
    backend = bench.backend("linear_cross_entropy")
    m, k, v = bench.sizes.vocabulary
    x, weight = bench.random(m, k), bench.random(v, k, scale=k**-0.5)
    target = torch.randint(v, (m,), device=bench.device)
    options = spec.CrossEntropyOptions()
    loss, lse, dx, dweight = bench.zeros(m), bench.zeros(m), bench.empty(m, k), bench.empty(v, k)
    dloss = torch.full((m,), 1 / m, device=bench.device)
    inputs = (x.detach().requires_grad_(), weight.detach().requires_grad_())

    others = bench.zeros(m), bench.zeros(m), bench.empty(m, k), bench.empty(v, k)

    def with_w_apart(kernels: Any, loss: Tensor, lse: Tensor, dx: Tensor, dweight: Tensor) -> None:
        kernels.cross_entropy_fwd(x, weight, None, target, options, loss, lse, dx)
        segment = (x, target, lse, dloss)
        kernels.cross_entropy_wgrad([segment], (dweight, None), False, weight=weight, bias=None, options=options)

    def ours() -> None:
        with_w_apart(backend, loss, lse, dx, dweight)

    peers: dict[str, Run] = {
        name: lambda function=function: torch.autograd.grad(function(*inputs, target), inputs)
        for name, function in gpu_peers.linear_cross_entropy().items()
    }
    peers["reference"] = lambda: with_w_apart(reference, *others)
    peers["reference, W in F"] = lambda: reference.cross_entropy_fwd(
        x, weight, None, target, options, *others[:3], (others[3], None)
    )

    def check() -> None:
        wanted = peers["torch"]()
        scaled = dx.float() / m  # ours is every row's own
        testing.assert_close(scaled.to(bench.dtype), wanted[0], "dx", bench.tolerance)  # theirs rounds the logits
        testing.assert_close(dweight, wanted[1], "dweight", bench.tolerance)

    yield Case(f"M={m} K={k} V={v}", ours, peers, check, 6 * m * k * v, *DECIDED, "reference")


DECIDING = ("with SwiGLU", "linear + cross entropy", "cast to FP8")
"""Rows of kernels that stay only where they gain."""

HEADLINE = ("product, ceiling", "copy, ceiling", "W, fp32 added", "W of 4, merged")

ROWS = (
    Row("product, ceiling", "TFLOP/s", "rate", ceilings),
    Row("copy, ceiling", "TB/s", "rate", memory.copies),
    Row("W, fp32 added", "TFLOP/s", "ratio", weight_gradient),
    Row("W of 4, merged", "TFLOP/s", "ratio", merged),
    Row("all W of a layer", "TFLOP/s", "ratio", whole_layer),
    Row("W of large layers", "TFLOP/s", "ratio", large_weight_gradient),
    Row("W of 8 experts", "TFLOP/s", "ratio", grouped_weight_gradient),
    Row("host time of a W", "us", "rate", host_time),
    Row("dgrad with SwiGLU", "TFLOP/s", "ratio", gated_dgrad),
    Row("forward with SwiGLU", "TFLOP/s", "ratio", gated_forward),
    Row("cast to FP8, rows", "TB/s", "ratio", partial(memory.float8_cast, turned=False)),
    Row("cast to FP8, columns", "TB/s", "ratio", partial(memory.float8_cast, turned=True)),
    Row("cast to FP8, one scale", "TB/s", "ratio", partial(memory.float8_cast, turned=True, whole=True)),
    Row("8 experts, forward", "TFLOP/s", "ratio", grouped_forward),
    Row("linear + cross entropy", "TFLOP/s", "ratio", linear_cross_entropy),
    Row("attention forward", "TFLOP/s", "rate", partial(attention, backward=False)),
    Row("attention backward", "TFLOP/s", "rate", partial(attention, backward=True)),
    Row("RMSNorm forward", "TB/s", "rate", memory.norm_forward),
    Row("RMSNorm backward", "TB/s", "rate", memory.norm_backward),
    Row("linear forward", "TFLOP/s", "ratio", partial(linears, dgrad=False)),
    Row("linear dgrad", "TFLOP/s", "ratio", partial(linears, dgrad=True)),
    Row("residual + norm, forward", "TB/s", "rate", memory.added_norm_forward),
    Row("residual + norm, backward", "TB/s", "rate", memory.added_norm_backward),
    Row("rotary, halves", "TB/s", "rate", memory.rotary),
    Row("rotary, interleaved", "TB/s", "rate", partial(memory.rotary, interleaved=True)),
)
"""What matters most first: a session may end before the last."""
