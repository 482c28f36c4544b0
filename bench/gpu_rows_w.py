"""The rows of `bench.gpu` that are weight gradients: alone, merged, of a layer, of experts, and their host time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bench.gpu_case import Bench, Case, Run
from zbkern import testing


def addmm(dweight: Tensor, segments: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The baseline for W: torch's product that accumulates into float32 in place."""
    for x, dy in segments:
        if dweight.is_cuda and x.dtype != torch.float32:
            torch.addmm(dweight, dy.t(), x, out_dtype=torch.float32, out=dweight)
        else:
            dweight.addmm_(dy.t().float(), x.float())


def exact(dweight: Tensor, segments: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The same in float32 throughout: what W is checked against, whatever `addmm` can on this machine."""
    for x, dy in segments:
        dweight.addmm_(dy.t().float(), x.float())


def terms(bench: Bench, tokens: int) -> int:
    """What `assert_close` is told of a W over so many tokens: how often tensor cores cut off."""
    return 0 if bench.dtype == torch.float32 else tokens


def _of_the_extension() -> dict[str, Callable[..., None]]:
    """W of the CUDA extension, where there is one."""
    from zbkern.kernels.cuda import wgrad

    if wgrad.why_not() is not None:
        return {}
    return {"our CUDA": wgrad.linear_wgrad}


def _wgrad(bench: Bench, tokens: int, count: int, n: int, k: int, goals: tuple[float, float]) -> Case:
    backend = bench.backend("linear")
    segments = [(bench.random(tokens, k), bench.random(tokens, n)) for _ in range(count)]
    ours, theirs = bench.zeros(n, k), bench.zeros(n, k)
    kernels = {"ours": backend.linear_wgrad, **_of_the_extension()}
    runs: dict[str, Run] = {
        name: lambda kernel=kernel: kernel(segments, (ours, None), True) for name, kernel in kernels.items()
    }
    peers = {"addmm": lambda: addmm(theirs, segments), **{name: runs[name] for name in list(runs)[1:]}}
    if count > 1:
        peers["ours, one by one"] = lambda: [backend.linear_wgrad([s], (ours, None), True) for s in segments]

    def check() -> None:
        exact(theirs.zero_(), segments)
        for name, run in runs.items():
            ours.zero_()
            run()
            testing.assert_close(ours, theirs, f"dweight, {name}", terms=terms(bench, count * tokens))

    return Case(
        f"{count} x T={tokens} N={n} K={k}",
        runs["ours"],
        peers,
        check,
        count * testing.linear_flops(tokens, k, n),
        *goals,
    )


def weight_gradient(bench: Bench) -> Iterator[Case]:
    for tokens in bench.sizes.tokens[:2][::-1]:
        for n, k in bench.sizes.layers:
            yield _wgrad(bench, tokens, 1, n, k, (0.95, 1.05))


def large_weight_gradient(bench: Bench) -> Iterator[Case]:
    for tokens, n, k in bench.sizes.large:
        yield _wgrad(bench, tokens, 1, n, k, (0.95, 1.05))


def merged(bench: Bench) -> Iterator[Case]:
    """The goals are times per microbatch: 12% less is a ratio of 1 / 0.88."""
    goals = ((1 / 0.88, 1 / 0.75), (1 / 0.95, 1 / 0.88), (1.0, 1 / 0.94))
    for tokens, goal in zip(bench.sizes.merged, goals, strict=False):
        for n, k in bench.sizes.layers[:2]:
            yield _wgrad(bench, tokens, 4, n, k, goal)


def _layer(bench: Bench, tokens: int) -> Case:
    """All W of a block of attention and MLP: seven weights."""
    backend = bench.backend("linear")
    d, h = bench.sizes.hidden
    shapes = [(d, d)] * 4 + [(h, d)] * 2 + [(d, h)]
    layers = [([(bench.random(tokens, k), bench.random(tokens, n))], (bench.zeros(n, k), None)) for n, k in shapes]
    others = [bench.zeros(n, k) for n, k in shapes]

    def one_by_one() -> None:
        for segments, outputs in layers:
            backend.linear_wgrad(segments, outputs, True)

    def all_addmm() -> None:
        for (segments, _), other in zip(layers, others, strict=True):
            addmm(other, segments)

    def check() -> None:
        for (_, (dweight, _)), other in zip(layers, others, strict=True):
            dweight.zero_(), other.zero_()
        backend.linear_wgrads(layers, True)
        for (segments, (dweight, _)), other in zip(layers, others, strict=True):
            exact(other, segments)
            testing.assert_close(dweight, other, "dweight", terms=terms(bench, tokens))

    return Case(
        f"T={tokens} d={d} h={h}",
        lambda: backend.linear_wgrads(layers, True),
        {"ours, one by one": one_by_one, "addmm": all_addmm},
        check,
        sum(testing.linear_flops(tokens, k, n) for n, k in shapes),
        1 / 0.97,
        1 / 0.92,
    )


def whole_layer(bench: Bench) -> Iterator[Case]:
    for tokens in bench.sizes.tokens[:2]:
        yield _layer(bench, tokens)


def experts(bench: Bench) -> tuple[list[int], Tensor]:
    """Rows of eight experts, every second of which has three times those of its neighbour; and where they end."""
    tokens, groups = bench.sizes.tokens[-1], 8
    counts = [tokens // groups * (1 + 2 * (group % 2)) // 2 for group in range(groups)]
    return counts, torch.tensor(counts, device=bench.device).cumsum(0).int()


def grouped_weight_gradient(bench: Bench) -> Iterator[Case]:
    backend = bench.backend("grouped_linear")
    (n, k), (counts, ends) = bench.sizes.layers[0], experts(bench)
    m, groups = sum(counts), len(counts)
    x, dy = bench.random(m, k), bench.random(m, n)
    ours, theirs = bench.zeros(groups, n, k), bench.zeros(groups, n, k)
    segments = list(zip(x.split(counts), dy.split(counts), strict=True))

    def one_by_one() -> None:
        for dweight, segment in zip(theirs, segments, strict=True):
            addmm(dweight, [segment])

    def library() -> None:  # rounds each microbatch's gradient to x's dtype, then adds it
        theirs.add_(torch._grouped_mm(dy.mT, x, ends))

    def check() -> None:
        ours.zero_(), theirs.zero_()
        backend.grouped_linear_wgrad([(x, dy, ends)], (ours, None), True)
        for dweight, segment in zip(theirs, segments, strict=True):
            exact(dweight, [segment])
        testing.assert_close(ours, theirs, "dweight", terms=terms(bench, max(counts)))

    yield Case(
        f"{groups} groups T={m} N={n} K={k}",
        lambda: backend.grouped_linear_wgrad([(x, dy, ends)], (ours, None), True),
        {"addmm, one by one": one_by_one, "torch._grouped_mm, added": library},
        check,
        testing.linear_flops(m, k, n),
        1.0,
        1.05,
    )


def host_time(bench: Bench) -> Iterator[Case]:
    """What calling a W costs the host: a small one, many in a row, each at the next of many addresses."""
    backend, (sets, turns) = bench.backend("linear"), bench.sizes.calls
    operands = [(bench.random(64, 64), bench.random(64, 64)) for _ in range(sets)]
    ours, theirs = bench.zeros(64, 64), bench.zeros(64, 64)

    def timed(call: Callable[[tuple[Tensor, Tensor]], object], turns: int = turns) -> Run:
        def measured() -> float:
            if bench.device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(turns):
                for segment in operands:
                    call(segment)
            return (time.perf_counter() - begin) / turns / sets

        return measured

    def ours_of(segment: tuple[Tensor, Tensor]) -> None:
        backend.linear_wgrad([segment], (ours, None), True)

    peers = {"addmm": timed(lambda segment: addmm(theirs, [segment]))}
    if bench.impl == "triton":
        from zbkern.kernels.triton.replay import replay

        def worked_out(segment: tuple[Tensor, Tensor]) -> None:
            with replay.paused():
                ours_of(segment)

        peers["ours, through Triton's Python"] = timed(worked_out, 1)
    yield Case("one W of [64, 64]", timed(ours_of), peers, lambda: None, floor=12.0, target=6.0)
