"""What `bench.gpu` measures: for every row the shapes, our launches, the peers', and a check that they agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from bench import gpu_peers
from zbkern import optim, testing
from zbkern.kernels import dispatch, spec

Run = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """Shapes of all rows: of large models, or small enough for a test on a CPU."""

    square: int = 8192
    copied: int = 2**30
    tokens: tuple[int, ...] = (2048, 4096, 8192)
    merged: tuple[int, ...] = (1024, 2048, 4096)
    layers: tuple[tuple[int, int], ...] = ((4096, 4096), (11008, 4096), (4096, 11008))  # N, K
    hidden: tuple[int, int] = (4096, 11008)
    heads: tuple[int, int, int] = (32, 128, 8192)  # heads, head size, tokens
    vocabulary: tuple[int, int, int] = (8192, 4096, 128256)  # tokens, features, vocabulary
    norm: tuple[int, int] = (16384, 4096)
    parameters: tuple[int, ...] = (*[4096 * 4096] * 4, *[11008 * 4096] * 3, *[4096] * 8)  # of an optimizer's tensors

    @classmethod
    def tiny(cls) -> Sizes:
        return cls(64, 4096, (32,), (16,), ((48, 32),), (32, 48), (2, 16, 32), (16, 32, 64), (24, 32), (64, 7))


@dataclass(frozen=True)
class Bench:
    """Where and how everything runs."""

    device: torch.device
    dtype: torch.dtype
    impl: str
    sizes: Sizes

    @property
    def tolerance(self) -> float:
        """Where both sides round on the way: twice what a single one is allowed."""
        return 2 * testing.TOLERANCE[self.dtype]

    def launches(self, op: str) -> ModuleType:
        return dispatch.resolve(op, self.impl, self.device, self.dtype)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device)


@dataclass(frozen=True)
class Case:
    """One shape of a row. flops and bytes: of one run of `ours`, the least that the operation needs."""

    label: str
    ours: Run
    peers: dict[str, Run]
    check: Run
    flops: int = 0
    bytes: int = 0
    floor: float | None = None  # in the unit of the row's goal
    target: float | None = None


@dataclass(frozen=True)
class Row:
    """unit: what `rate` is given in. goal: what floor and target are about: "ratio" to the first peer, or "rate"."""

    name: str
    unit: str
    goal: str
    cases: Callable[[Bench], Iterator[Case]] = field(repr=False)

    def rate(self, case: Case, seconds: float) -> float:
        if self.unit == "us":
            return seconds * 1e6
        return (case.flops if self.unit == "TFLOP/s" else case.bytes) / seconds / 1e12


def ceilings(bench: Bench) -> Iterator[Case]:
    """The two roofs: a large product by torch, and a copy."""
    n = bench.sizes.square
    a, b, out = bench.random(n, n), bench.random(n, n), bench.empty(n, n)
    size = a.element_size()
    run = lambda: torch.mm(a, b, out=out)  # noqa: E731
    yield Case(f"torch.mm {n}^3", run, {}, lambda: None, 2 * n**3, 3 * n * n * size)


def copies(bench: Bench) -> Iterator[Case]:
    source = torch.zeros(bench.sizes.copied, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    count = bench.sizes.copied
    yield Case(f"copy of {count / 2**20:g} MiB", lambda: target.copy_(source), {}, lambda: None, 0, 2 * count)


def _product_bytes(m: int, n: int, k: int, size: int, out: int) -> int:
    return (m * k + n * k) * size + m * n * out


def forward(bench: Bench) -> Iterator[Case]:
    launches = bench.launches("linear")
    for m in bench.sizes.tokens:
        for n, k in bench.sizes.layers:
            x, weight, y, other = bench.random(m, k), bench.random(n, k), bench.empty(m, n), bench.empty(m, n)
            yield Case(
                f"M={m} N={n} K={k}",
                lambda x=x, weight=weight, y=y: launches.linear_fwd(x, weight, None, y),
                {"cuBLAS": lambda x=x, weight=weight, other=other: torch.mm(x, weight.t(), out=other)},
                lambda y=y, other=other: testing.assert_close(y, other, "y"),
                testing.linear_flops(m, k, n),
                _product_bytes(m, n, k, x.element_size(), x.element_size()),
                0.90,
                1.00,
            )


def input_gradient(bench: Bench) -> Iterator[Case]:
    launches = bench.launches("linear")
    for m in bench.sizes.tokens:
        for n, k in bench.sizes.layers:
            dy, weight, dx, other = bench.random(m, n), bench.random(n, k), bench.empty(m, k), bench.empty(m, k)
            yield Case(
                f"M={m} N={n} K={k}",
                lambda dy=dy, weight=weight, dx=dx: launches.linear_dgrad(dy, weight, dx),
                {"cuBLAS": lambda dy=dy, weight=weight, other=other: torch.mm(dy, weight, out=other)},
                lambda dx=dx, other=other: testing.assert_close(dx, other, "dx"),
                testing.linear_flops(m, k, n),
                _product_bytes(m, k, n, dy.element_size(), dy.element_size()),
                0.90,
                1.00,
            )


def addmm(dweight: Tensor, segments: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The baseline for W: torch's product that accumulates into float32 in place."""
    for x, dy in segments:
        if dweight.is_cuda and x.dtype != torch.float32:
            torch.addmm(dweight, dy.t(), x, out_dtype=torch.float32, out=dweight)
        else:
            dweight.addmm_(dy.t().float(), x.float())


def _wgrad(bench: Bench, tokens: int, count: int, n: int, k: int, goals: tuple[float, float]) -> Case:
    launches = bench.launches("linear")
    segments = [(bench.random(tokens, k), bench.random(tokens, n)) for _ in range(count)]
    ours, theirs = bench.zeros(n, k), bench.zeros(n, k)
    peers = {"addmm": lambda: addmm(theirs, segments)}
    if count > 1:
        single = bench.zeros(n, k)
        peers["ours, one by one"] = lambda: [launches.linear_wgrad([s], (single, None), True) for s in segments]

    def check() -> None:
        launches.linear_wgrad(segments, (ours.zero_(), None), True)
        addmm(theirs.zero_(), segments)
        testing.assert_close(ours, theirs, "dweight")

    size = segments[0][0].element_size()
    return Case(
        f"{count} x T={tokens} N={n} K={k}",
        lambda: launches.linear_wgrad(segments, (ours, None), True),
        peers,
        check,
        count * testing.linear_flops(tokens, k, n),
        count * tokens * (n + k) * size + 8 * n * k,
        *goals,
    )


def weight_gradient(bench: Bench) -> Iterator[Case]:
    for tokens in bench.sizes.tokens[:2][::-1]:
        for n, k in bench.sizes.layers:
            yield _wgrad(bench, tokens, 1, n, k, (0.95, 1.05))


def merged(bench: Bench) -> Iterator[Case]:
    """The goals are times per microbatch: 12% less is a ratio of 1 / 0.88."""
    goals = ((1 / 0.88, 1 / 0.75), (1 / 0.95, 1 / 0.88), (1.0, 1 / 0.94))
    for tokens, goal in zip(bench.sizes.merged, goals, strict=False):
        for n, k in bench.sizes.layers[:2]:
            yield _wgrad(bench, tokens, 4, n, k, goal)


def whole_layer(bench: Bench) -> Iterator[Case]:
    """All W of a block of attention and MLP: seven weights."""
    launches = bench.launches("linear")
    d, h = bench.sizes.hidden
    shapes = [(d, d)] * 4 + [(h, d)] * 2 + [(d, h)]
    for tokens in bench.sizes.tokens[:2]:
        layers = [([(bench.random(tokens, k), bench.random(tokens, n))], (bench.zeros(n, k), None)) for n, k in shapes]
        others = [bench.zeros(n, k) for n, k in shapes]

        def one_by_one(layers: list = layers) -> None:
            for segments, outputs in layers:
                launches.linear_wgrad(segments, outputs, True)

        def all_addmm(layers: list = layers, others: list = others) -> None:
            for (segments, _), other in zip(layers, others, strict=True):
                addmm(other, segments)

        def check(layers: list = layers, others: list = others, all_addmm: Run = all_addmm) -> None:
            for (_, (dweight, _)), other in zip(layers, others, strict=True):
                dweight.zero_(), other.zero_()
            launches.linear_wgrads(layers, True)
            all_addmm()
            for (_, (dweight, _)), other in zip(layers, others, strict=True):
                testing.assert_close(dweight, other, "dweight")

        size = layers[0][0][0][0].element_size()
        yield Case(
            f"T={tokens} d={d} h={h}",
            lambda layers=layers: launches.linear_wgrads(layers, True),
            {"ours, one by one": one_by_one, "addmm": all_addmm},
            check,
            sum(testing.linear_flops(tokens, k, n) for n, k in shapes),
            sum(tokens * (n + k) * size + 8 * n * k for n, k in shapes),
            1 / 0.97,
            1 / 0.92,
        )


def gated_dgrad(bench: Bench) -> Iterator[Case]:
    launches = bench.launches("gated_mlp")
    n, h = bench.sizes.hidden
    for m in bench.sizes.tokens:
        dy, down, gate, up = bench.random(m, n), bench.random(n, h), bench.random(m, h), bench.random(m, h)
        ours, theirs = ([bench.empty(m, h) for _ in range(3)] for _ in range(2))
        dh = bench.empty(m, h)

        def two(dy=dy, down=down, gate=gate, up=up, dh=dh, theirs=theirs) -> None:  # type: ignore[no-untyped-def]
            torch.mm(dy, down, out=dh)
            launches.gated_bwd(dh, gate, up, "silu", *theirs)

        def check(ours: list = ours, theirs: list = theirs) -> None:
            for name, got, wanted in zip(("dgate", "dup", "h"), ours, theirs, strict=True):
                testing.assert_close(got, wanted, name, bench.tolerance)  # theirs rounds dh

        yield Case(
            f"M={m} N={n} H={h}",
            lambda dy=dy, down=down, gate=gate, up=up, ours=ours: launches.gated_linear_dgrad(
                dy, down, gate, up, "silu", *ours
            ),
            {"cuBLAS, then our gate": two},
            check,
            testing.linear_flops(m, h, n),
            (m * n + n * h + 5 * m * h) * dy.element_size(),
            1.03,
            1.10,
        )


def norm_forward(bench: Bench) -> Iterator[Case]:
    launches = bench.launches("rms_norm")
    m, k = bench.sizes.norm
    x, weight, y, rstd = bench.random(m, k), bench.random(k), bench.empty(m, k), bench.zeros(m)
    peers = gpu_peers.rms_norm(weight, 1e-5)

    def check() -> None:
        testing.assert_close(y, peers["torch"](x), "y")

    yield Case(
        f"M={m} K={k}",
        lambda: launches.rms_norm_fwd(x, weight, 1e-5, y, rstd),
        {name: lambda run=run: run(x) for name, run in peers.items()},
        check,
        0,
        2 * m * k * x.element_size(),
        2.4,
        2.9,
    )


def _backward(forward: Callable[[], Tensor], inputs: Sequence[Tensor], dy: Tensor) -> Run:
    """The backward of a peer alone; its forward runs at the first call, where it may say why it cannot."""
    graph: list[Tensor] = []

    def run() -> Sequence[Tensor]:
        if not graph:
            graph.append(forward())
        return torch.autograd.grad(graph[0], inputs, dy, retain_graph=True)

    return run


def norm_backward(bench: Bench) -> Iterator[Case]:
    launches = bench.launches("rms_norm")
    m, k = bench.sizes.norm
    x, weight, y, dy = (bench.random(*shape) for shape in ((m, k), (k,), (m, k), (m, k)))
    rstd, dx, dweight = bench.zeros(m), bench.empty(m, k), bench.empty(k)
    launches.rms_norm_fwd(x, weight, 1e-5, y, rstd)
    partials = bench.zeros(1, launches.norm_partials(m, k, x.device), k)

    def ours() -> None:
        launches.rms_norm_dgrad(dy, x, weight, rstd, dx, partials)
        launches.norm_wgrad([(partials,)], (dweight,), False)

    peers, inputs = {}, (x.detach().requires_grad_(), weight.detach().requires_grad_())
    for name, run in gpu_peers.rms_norm(inputs[1], 1e-5).items():
        peers[name] = _backward(lambda run=run: run(inputs[0]), inputs, dy)

    def check() -> None:
        wanted = peers["torch"]()
        testing.assert_close(dx, wanted[0], "dx")
        testing.assert_close(dweight, wanted[1], "dweight")

    yield Case(f"M={m} K={k}", ours, peers, check, 0, 3 * m * k * x.element_size(), 2.1, 2.7)


def _attention(bench: Bench, backward: bool) -> Case:
    launches = bench.launches("attention")
    heads, d, tokens = bench.sizes.heads
    q, k, v, dy = (bench.random(tokens, heads, d) for _ in range(4))
    y, gradients = torch.empty_like(q), [torch.empty_like(q) for _ in range(3)]
    lse = bench.zeros(heads, tokens)
    options = spec.AttentionOptions(d**-0.5, True, None, (0, tokens), (0, tokens))
    inputs = [t.unsqueeze(0).requires_grad_(backward) for t in (q, k, v)]
    functions = gpu_peers.attention(bench.device)
    launches.attention_fwd(*(t.detach() for t in (q, k, v)), options, y, lse)
    peers: dict[str, Run] = {}
    for name, function in functions.items():
        if backward:
            peers[name] = _backward(lambda function=function: function(*inputs), inputs, dy.unsqueeze(0))
        else:
            peers[name] = lambda function=function: function(*inputs)
    reference = next(iter(peers.values()))

    def ours() -> None:
        if backward:
            launches.attention_dgrad(dy, q, k, v, y, lse, options, *gradients)
        else:
            launches.attention_fwd(q, k, v, options, y, lse)

    def check() -> None:
        wanted = reference()
        got = gradients if backward else [y]
        for index, (mine, other) in enumerate(zip(got, wanted if backward else [wanted], strict=True)):
            testing.assert_close(mine, other.squeeze(0), f"output {index}", bench.tolerance)

    size = q.element_size()
    flops = testing.attention_flops(1, heads, tokens, tokens, d, causal=True, backward=backward)
    goals = (250.0, 450.0) if backward else (400.0, 580.0)
    moved = (8 if backward else 4) * q.numel() * size
    return Case(f"heads={heads} d={d} T={tokens} causal", ours, peers, check, flops, moved, *goals)


def attention_forward(bench: Bench) -> Iterator[Case]:
    yield _attention(bench, False)


def attention_backward(bench: Bench) -> Iterator[Case]:
    yield _attention(bench, True)


def linear_cross_entropy(bench: Bench) -> Iterator[Case]:
    """Loss, dx and dweight of the output layer: three products count, whatever is computed twice."""
    launches = bench.launches("linear_cross_entropy")
    m, k, v = bench.sizes.vocabulary
    x, weight = bench.random(m, k), bench.random(v, k) * k**-0.5
    target = torch.randint(v, (m,), device=bench.device)
    options = spec.CrossEntropyOptions()
    loss, lse, dx, dweight = bench.zeros(m), bench.zeros(m), bench.empty(m, k), bench.empty(v, k)
    dloss = torch.full((m,), 1 / m, device=bench.device)
    inputs = (x.detach().requires_grad_(), weight.detach().requires_grad_())

    def ours() -> None:
        launches.cross_entropy_fwd(x, weight, None, target, options, loss, lse, dx)
        segment = (x, target, lse, dloss)
        launches.cross_entropy_wgrad([segment], (dweight, None), False, weight=weight, bias=None, options=options)

    peers = {
        name: lambda function=function: torch.autograd.grad(function(*inputs, target), inputs)
        for name, function in gpu_peers.linear_cross_entropy().items()
    }

    def check() -> None:
        wanted = peers["torch"]()
        scaled = dx.float() / m  # ours is every row's own
        testing.assert_close(scaled.to(bench.dtype), wanted[0], "dx", bench.tolerance)  # theirs rounds the logits
        testing.assert_close(dweight, wanted[1], "dweight", bench.tolerance)

    size = x.element_size()
    yield Case(f"M={m} K={k} V={v}", ours, peers, check, 6 * m * k * v, 2 * (m * k + v * k) * size, 450.0, 600.0)


def adamw(bench: Bench) -> Iterator[Case]:
    yield _adamw(bench, torch.float32)


def adamw_with_masters(bench: Bench) -> Iterator[Case]:
    yield _adamw(bench, torch.bfloat16)


def _adamw(bench: Bench, dtype: torch.dtype) -> Case:
    """Weights in fp32; or in bf16 with fp32 masters, where the peer casts gradients, steps masters, and rounds them."""
    ours = [torch.nn.Parameter(bench.random(n).to(dtype)) for n in bench.sizes.parameters]
    theirs = [torch.nn.Parameter(parameter.detach().float()) for parameter in ours]
    rounded = [torch.empty_like(parameter) for parameter in ours]
    for parameter, twin in zip(ours, theirs, strict=True):
        parameter.grad = torch.randn_like(parameter)
        twin.grad = parameter.grad.float()
    impl = "auto" if bench.impl == "triton" else bench.impl
    optimizer = optim.AdamW(ours, weight_decay=0.1, master_weights=True, impl=impl)
    peer = torch.optim.AdamW(theirs, weight_decay=0.1, fused=True)

    @torch.no_grad()
    def peers_step() -> None:
        if dtype != torch.float32:
            torch._foreach_copy_([twin.grad for twin in theirs], [parameter.grad for parameter in ours])
        peer.step()
        if dtype != torch.float32:
            torch._foreach_copy_(rounded, theirs)

    def check() -> None:
        for parameter, twin in zip(ours, theirs, strict=True):
            testing.assert_close(optimizer.state[parameter].get("master", parameter).detach(), twin.detach(), "weight")

    count = sum(bench.sizes.parameters)
    # weight, exp_avg, exp_avg_sq there and back; gradient once: in bf16 it leaves room for the rounded weight
    return Case(f"{count:,} weights", optimizer.step, {"torch, fused": peers_step}, check, 0, 28 * count, 0.95, 1.0)


def host_time(bench: Bench) -> Iterator[Case]:
    """What a W launch costs the calling thread: a small one, many in a row."""
    launches = bench.launches("linear")
    count = 200 if bench.device.type == "cuda" else 2
    x, dy = bench.random(64, 256), bench.random(64, 256)
    ours, theirs = bench.zeros(256, 256), bench.zeros(256, 256)

    def timed(run: Run) -> Run:
        def measured() -> float:
            if bench.device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                run()
            return (time.perf_counter() - begin) / count

        return measured

    yield Case(
        "one W of [256, 256]",
        timed(lambda: launches.linear_wgrad([(x, dy)], (ours, None), True)),
        {"addmm": timed(lambda: addmm(theirs, [(x, dy)]))},
        lambda: None,
        floor=12.0,
        target=6.0,
    )


ROWS = (
    Row("product, ceiling", "TFLOP/s", "rate", ceilings),
    Row("copy, ceiling", "TB/s", "rate", copies),
    Row("linear forward", "TFLOP/s", "ratio", forward),
    Row("linear dgrad", "TFLOP/s", "ratio", input_gradient),
    Row("W, fp32 added", "TFLOP/s", "ratio", weight_gradient),
    Row("W of 4, merged", "TFLOP/s", "ratio", merged),
    Row("all W of a layer", "TFLOP/s", "ratio", whole_layer),
    Row("dgrad with SwiGLU", "TFLOP/s", "ratio", gated_dgrad),
    Row("RMSNorm forward", "TB/s", "rate", norm_forward),
    Row("RMSNorm backward", "TB/s", "rate", norm_backward),
    Row("attention forward", "TFLOP/s", "rate", attention_forward),
    Row("attention backward", "TFLOP/s", "rate", attention_backward),
    Row("linear + cross entropy", "TFLOP/s", "rate", linear_cross_entropy),
    Row("AdamW, fp32", "TB/s", "ratio", adamw),
    Row("AdamW, bf16 + masters", "TB/s", "ratio", adamw_with_masters),
    Row("host time of a W", "us", "rate", host_time),
)
