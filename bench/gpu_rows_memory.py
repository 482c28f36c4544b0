"""The rows of `bench.gpu` that move memory and do little else: copies, norms, rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import gpu_peers
from bench.gpu_case import Bench, Case, Run
from zbkern import testing
from zbkern.kernels import reference


def copies(bench: Bench) -> Iterator[Case]:
    """Of random bytes: a memory that compresses zeros would set the roof too high."""
    source = torch.randint(256, (bench.sizes.copied,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    count = bench.sizes.copied
    yield Case(f"copy of {count / 2**20:g} MiB", lambda: target.copy_(source), {}, lambda: None, 2 * count)


def norm_forward(bench: Bench) -> Iterator[Case]:
    backend = bench.backend("rms_norm")
    m, k = bench.sizes.norm
    x, weight, y, rstd = bench.random(m, k), bench.random(k), bench.empty(m, k), bench.zeros(m)
    peers = gpu_peers.rms_norm(weight, 1e-5)

    def check() -> None:
        testing.assert_close(y, peers["torch"](x), "y")

    yield Case(
        f"M={m} K={k}",
        lambda: backend.norm_fwd(x, weight, None, 1e-5, y, None, rstd),
        {name: lambda run=run: run(x) for name, run in peers.items()},
        check,
        2 * m * k * x.element_size(),
        2.4,
        2.9,
    )


def backward_of(forward: Callable[[], Tensor], inputs: Sequence[Tensor], dy: Tensor) -> Run:
    """The backward of a peer alone; its forward runs at the first call, where it may say why it cannot."""
    graph: list[Tensor] = []

    def run() -> Sequence[Tensor]:
        if not graph:
            graph.append(forward())
        return torch.autograd.grad(graph[0], inputs, dy, retain_graph=True)

    return run


def norm_backward(bench: Bench) -> Iterator[Case]:
    backend = bench.backend("rms_norm")
    m, k = bench.sizes.norm
    x, weight, y, dy = (bench.random(*shape) for shape in ((m, k), (k,), (m, k), (m, k)))
    rstd, dx, dweight = bench.zeros(m), bench.empty(m, k), bench.empty(k)
    backend.norm_fwd(x, weight, None, 1e-5, y, None, rstd)
    partials = bench.zeros(1, backend.norm_partials(m, k, x.device), k)

    def ours() -> None:
        backend.norm_dgrad(dy, x, weight, None, rstd, dx, partials)
        backend.norm_wgrad([(partials,)], (dweight,), False)

    peers, inputs = {}, (x.detach().requires_grad_(), weight.detach().requires_grad_())
    for name, run in gpu_peers.rms_norm(inputs[1], 1e-5).items():
        peers[name] = backward_of(lambda run=run: run(inputs[0]), inputs, dy)

    def check() -> None:
        wanted = peers["torch"]()
        testing.assert_close(dx, wanted[0], "dx")
        testing.assert_close(dweight, wanted[1], "dweight")

    yield Case(f"M={m} K={k}", ours, peers, check, 3 * m * k * x.element_size(), 2.1, 2.7)


def added_norm_forward(bench: Bench) -> Iterator[Case]:
    """The residual's addition and the norm of the sum: both are read once, the sum and its norm written once."""
    backend = bench.backend("rms_norm")
    m, k = bench.sizes.norm
    x, residual, weight, rstd = bench.random(m, k), bench.random(m, k), bench.random(k), bench.zeros(m)
    summed, y, other, other_y = (bench.empty(m, k) for _ in range(4))
    peers = gpu_peers.added_rms_norm(weight, 1e-5)

    def two() -> None:
        torch.add(x, residual, out=other)
        backend.norm_fwd(other, weight, None, 1e-5, other_y, None, rstd)

    def check() -> None:
        wanted = peers["torch"](x, residual)
        testing.assert_close(summed, wanted[1], "summed")
        testing.assert_close(y, wanted[0], "y")

    yield Case(
        f"M={m} K={k}",
        lambda: backend.norm_fwd(x, weight, None, 1e-5, y, None, rstd, residual, summed),
        {name: lambda run=run: run(x, residual) for name, run in peers.items()} | {"torch's sum, our norm": two},
        check,
        4 * m * k * x.element_size(),
        2.4,
        2.9,
    )


def added_norm_backward(bench: Bench) -> Iterator[Case]:
    """dx of the sum from both of its uses; torch's gradients of both summands are this one tensor."""
    backend = bench.backend("rms_norm")
    m, k = bench.sizes.norm
    summed, y, dy, dsummed = (bench.random(m, k) for _ in range(4))
    weight, rstd, dx, dweight = bench.random(k), bench.zeros(m), bench.empty(m, k), bench.empty(k)
    backend.norm_fwd(summed, weight, None, 1e-5, y, None, rstd)
    partials = bench.zeros(1, backend.norm_partials(m, k, summed.device), k)

    def ours() -> None:
        backend.norm_dgrad(dy, summed, weight, None, rstd, dx, partials, dsummed)
        backend.norm_wgrad([(partials,)], (dweight,), False)

    inputs = summed.detach().requires_grad_(), weight.detach().requires_grad_()
    norm = backward_of(lambda: gpu_peers.rms_norm(inputs[1], 1e-5)["torch"](inputs[0]), inputs, dy)

    def theirs() -> Sequence[Tensor]:
        dx, dweight = norm()
        return dx.add_(dsummed), dweight

    def check() -> None:
        wanted = theirs()
        testing.assert_close(dx, wanted[0], "dx", bench.tolerance)  # theirs is rounded before the addition
        testing.assert_close(dweight, wanted[1], "dweight")

    size = dy.element_size()
    yield Case(f"M={m} K={k}", ours, {"torch": theirs}, check, 4 * m * k * size, 2.1, 2.7)


def rotary(bench: Bench, interleaved: bool = False) -> Iterator[Case]:
    """All columns of every head rotated; the backward is the same kernel with the other sign."""
    backend = bench.backend("rotary")
    heads, size, tokens = bench.sizes.heads
    x, y = bench.random(1, tokens, heads, size), bench.empty(1, tokens, heads, size)
    angles = torch.rand(tokens, size // 2, device=bench.device) * 6.28
    cos, sin = angles.cos(), angles.sin()
    peers = gpu_peers.rotary(cos, sin, interleaved)
    yield Case(
        f"heads={heads} d={size} T={tokens}",
        lambda: backend.rotary_fwd(x, cos, sin, interleaved, y),
        {name: lambda run=run: run(x) for name, run in peers.items()},
        lambda: testing.assert_close(y, peers["torch"](x), "y"),
        2 * x.nbytes + cos.nbytes + sin.nbytes,
        2.4,
        2.9,
    )


def float8_cast(bench: Bench, turned: bool, whole: bool = False) -> Iterator[Case]:
    """Of an activation's rows, or (turned) of a weight's columns, with a scale for each or for all: what F and B of
    torchao's layers cast. The peer has torchao's operations one by one, and copies what a product wants turned."""
    (m, k), (n, _), kind = bench.sizes.norm, bench.sizes.layers[-1], torch.float8_e4m3fn
    backend, x = bench.backend("float8"), bench.random(n, k).t() if turned else bench.random(m, k)
    scale, other_scale = (bench.zeros(1 if whole else len(x)) for _ in range(2))
    amax, y = bench.zeros(512) if whole else None, bench.empty(*x.shape, dtype=kind)
    other, copied = torch.empty_like(x, dtype=kind), torch.empty_like(y)

    def cast(kernels: Any, y: Tensor, scale: Tensor) -> None:
        if amax is not None:
            kernels.float8_amax(x, amax)
        kernels.float8_cast(x, amax, True, y, scale)

    def torchs() -> None:
        cast(reference, other, other_scale)
        if other.stride() != copied.stride():
            copied.copy_(other)

    def check() -> None:
        torchs()
        testing.assert_close(y.float() / scale.view(-1, 1), other.float() / other_scale.view(-1, 1), "y", 1e-6)

    work = x.numel() * (x.element_size() + y.element_size())
    yield Case(f"M={len(x)} K={x.shape[1]}", lambda: cast(backend, y, scale), {"torch": torchs}, check, work, 1.0, 3.0)
