"""Raw launches of any implementation on any device against the reference in float64: what the interpreter's tests and
the GPU's tests share. Outputs start as nan inside larger buffers: every element is written, and none beside them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from zbkern import testing
from zbkern.kernels import reference
from zbkern.kernels.reference import fp8
from zbkern.kernels.reference import grouped as reference_grouped
from zbkern.kernels.spec import GateOptions

LAYOUTS = ("plain", "padded", "transposed", "odd", "step")


def place(values: Tensor, layout: str) -> Tensor:
    """The same matrix, laid out in a larger buffer of nan.

    padded: longer rows, aligned. transposed: columns are contiguous. odd: longer rows, nothing aligned. step: every
    second column.
    """
    rows, columns = values.shape
    if layout == "transposed":
        view = values.new_full((columns, rows + 8), float("nan"))[:, :rows].t()
    elif layout == "padded":
        view = values.new_full((rows, columns + 16), float("nan"))[:, :columns]
    elif layout == "odd":
        view = values.new_full((rows, columns + 3), float("nan"))[:, 1 : columns + 1]
    elif layout == "step":
        view = values.new_full((rows, 2 * columns), float("nan"))[:, ::2]
    else:
        view = torch.empty_like(values)
    return view.copy_(values)


def output(
    shape: Sequence[int], dtype: torch.dtype, device: str, layout: str = "plain", value: float = float("nan")
) -> Tensor:
    return place(torch.full(tuple(shape), value, dtype=dtype, device=device), layout)


def check(name: str, got: Tensor, expected: Tensor, tolerance: float | None = None, terms: int = 0) -> None:
    """What is not finite must be so in the same places; the rest is compared by value. terms: as in testing."""
    expected = expected.to(got.device)
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{name}: values that are not finite are in other places"
    testing.assert_close(got.where(finite, 0), expected.where(finite, 0), name, tolerance, terms=terms)
    if got._base is not None:
        untouched = int(got._base.isnan().sum()) - int(got.isnan().sum())
        assert untouched == got._base.numel() - got.numel(), f"{name}: wrote beside its output"


def terms(segments: Sequence[tuple[Tensor, ...]]) -> int:
    """The products of half precision that W sums. Those of float32's parts are added by float32's rounding."""
    return sum(x.shape[0] for x, *_ in segments if x.dtype not in (torch.float32, torch.float64))


KINDS = ("normal", "large", "denormal", "special")


class Random:
    """Random tensors of one dtype on one device. scale: their standard deviation.

    kind: "large" spreads the rows over many powers of two, as far as products of two stay finite; "denormal" makes
    every second tensor denormal and the others large; "special" strews nan, both infinities and zeros over them.
    """

    def __init__(
        self, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0, kind: str = "normal"
    ) -> None:
        self.dtype, self.device, self.scale, self.kind = dtype, device, scale, kind
        self.generator = torch.Generator().manual_seed(seed)
        self.count = 0

    def __call__(self, *shape: int, layout: str = "plain") -> Tensor:
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64) * self.scale
        self.count += 1
        half = self.dtype == torch.float16
        if self.kind == "large":
            exponents = torch.randint(-6, 4 if half else 40, (*shape[:-1], 1), generator=self.generator)
            values *= 2.0**exponents
        elif self.kind == "denormal":
            tiny = 2.0 ** (-17 if half else -130)
            values *= tiny if self.count % 2 else (2.0**8 if half else 2.0**100)
        elif self.kind == "special" and values.numel():
            places = torch.randint(values.numel(), (4,), generator=self.generator)
            values.view(-1)[places] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0]).double()
        values = values.to(self.dtype).to(self.device)
        return values if len(shape) != 2 else place(values, layout)


def linear_fwd(
    launches: ModuleType, random: Random, m: int, n: int, k: int, layouts: Sequence[str] = ("plain",) * 3,
    bias: bool = False, activation: str | None = None, keep: bool = False,
) -> None:  # fmt: skip
    x, weight = random(m, k, layout=layouts[0]), random(n, k, layout=layouts[1])
    b = random(n) if bias else None
    y = output((m, n), random.dtype, random.device, layouts[2])
    z = output((m, n), random.dtype, random.device, layouts[2]) if keep else None
    launches.linear_fwd(x, weight, b, y, activation, z)
    wide = x.double() @ weight.double().t() + (0 if b is None else b.double())
    if z is not None:
        check("z", z, wide)
    check("y", y, wide if activation is None else reference.activation_function(activation)(wide))


def linear_dgrad(
    launches: ModuleType, random: Random, m: int, n: int, k: int, layouts: Sequence[str] = ("plain",) * 3,
    accumulate: bool = False, activation: str | None = None,
) -> None:  # fmt: skip
    dy, weight = random(m, n, layout=layouts[0]), random(n, k, layout=layouts[1])
    dx = output((m, k), random.dtype, random.device, layouts[2], 1.0 if accumulate else float("nan"))
    z = None if activation is None else random(m, k, layout=layouts[2])
    launches.linear_dgrad(dy, weight, dx, accumulate, activation, z)
    wide = dy.double() @ weight.double()
    if z is not None:
        product, wide = wide, torch.empty_like(wide)
        reference.activation_bwd(product, z.double(), activation, wide)
    check("dx", dx, wide + 1 if accumulate else wide)


def dequantised(tensor: Tensor, rows: int) -> Tensor:
    """What is left of it in FP8 with a scale for each rows x 128, in float64."""
    values, scales = fp8.quantised(tensor, rows)
    each = scales.double().repeat_interleave(rows, 0).repeat_interleave(fp8.BLOCK, 1)
    return values.double() * each[: tensor.shape[0], : tensor.shape[1]]


def fp8_linear(
    launches: ModuleType, random: Random, m: int, n: int, k: int, layouts: Sequence[str] = ("plain",) * 3
) -> None:
    """Both launches. Hopper's tensor cores sum 8-bit products with 14 bits: bfloat16's tolerance for any dtype."""
    tolerance = testing.tolerance_of(torch.bfloat16)
    x, dy, weight, bias = random(m, k, layout=layouts[0]), random(m, n), random(n, k, layout=layouts[1]), random(n)
    y = output((m, n), random.dtype, random.device, layouts[2])
    launches.fp8_linear_fwd(x, weight, bias, y)
    check("y", y, dequantised(x, 1) @ dequantised(weight, 128).t() + bias.double(), tolerance)
    dx = output((m, k), random.dtype, random.device, layouts[2])
    launches.fp8_linear_dgrad(dy, weight, dx)
    check("dx", dx, dequantised(dy, 1) @ dequantised(weight, 128), tolerance)


def linear_wgrad(
    launches: ModuleType, random: Random, rows: Sequence[int], n: int, k: int,
    layouts: Sequence[str] = ("plain",) * 3, out: torch.dtype | None = None, accumulate: bool = False,
    bias: bool = True, weight: bool = True,
) -> None:  # fmt: skip
    segments = [(random(m, k, layout=layouts[0]), random(m, n, layout=layouts[1])) for m in rows]
    start = 1.0 if accumulate else float("nan")
    out = out or random.dtype
    dweight = output((n, k), out, random.device, layouts[2], start) if weight else None
    dbias = torch.full((n,), start, dtype=out, device=random.device) if bias else None
    launches.linear_wgrad(segments, (dweight, dbias), accumulate)
    if dweight is not None:
        wide = sum((dy.double().t() @ x.double() for x, dy in segments), torch.zeros_like(dweight, dtype=torch.float64))
        check("dweight", dweight, wide + accumulate, terms=terms(segments))
    if dbias is not None:
        wide = sum((dy.double().sum(0) for _, dy in segments), torch.zeros_like(dbias, dtype=torch.float64))
        check("dbias", dbias, wide + accumulate)


def linear_dgrad_sum(
    launches: ModuleType, random: Random, m: int, ns: Sequence[int], k: int, layouts: Sequence[str] = ("plain",) * 3
) -> None:
    segments = [(random(m, n, layout=layouts[0]), random(n, k, layout=layouts[1])) for n in ns]
    dx = output((m, k), random.dtype, random.device, layouts[2])
    launches.linear_dgrad_sum(segments, dx)
    check("dx", dx, sum(dy.double() @ weight.double() for dy, weight in segments))


def gated_linear(
    launches: ModuleType, random: Random, m: int, n: int, k: int, h: int, layouts: Sequence[str] = ("plain",) * 3,
    activation: str = "silu", bias: bool = False,
) -> None:  # fmt: skip
    """Forward, then the dgrad of the down projection from the same gate and up."""
    x, weights = random(m, k, layout=layouts[0]), [random(h, k, layout=layouts[1]) for _ in range(2)]
    biases = [random(h) if bias else None for _ in range(2)]
    gate, up, gated = (output((m, h), random.dtype, random.device, layouts[2]) for _ in range(3))
    launches.gated_linear_fwd(x, *weights, *biases, activation, gate, up, gated)
    wide = [torch.empty(m, h, dtype=torch.float64, device=random.device) for _ in range(3)]
    doubles = [None if b is None else b.double() for b in biases]
    reference.gated_linear_fwd(x.double(), *(w.double() for w in weights), *doubles, activation, *wide)
    for name, got, expected in zip(("gate", "up", "h"), (gate, up, gated), wide, strict=True):
        check(name, got, expected)
    dy, down = random(m, n, layout=layouts[0]), random(n, h, layout=layouts[1])
    outputs = [output((m, h), random.dtype, random.device, layouts[2]) for _ in range(3)]
    launches.gated_linear_dgrad(dy, down, gate, up, activation, *outputs)
    reference.gated_linear_dgrad(dy.double(), down.double(), gate.double(), up.double(), activation, *wide)
    for name, got, expected in zip(("dgate", "dup", "h"), outputs, wide, strict=True):
        check(name, got, expected)


def linear_wgrads(
    launches: ModuleType, random: Random, shapes: Sequence[tuple[int, int, Sequence[int]]],
    layouts: Sequence[str] = ("plain",) * 3, accumulate: bool = False, bias: bool = True,
) -> None:  # fmt: skip
    """Several weights at once; shapes: (N, K, rows of every segment) of each."""
    layers, start = [], 1.0 if accumulate else float("nan")
    for n, k, rows in shapes:
        segments = [(random(m, k, layout=layouts[0]), random(m, n, layout=layouts[1])) for m in rows]
        dweight = output((n, k), torch.float32, random.device, layouts[2], start)
        dbias = torch.full((n,), start, device=random.device) if bias else None
        layers.append((segments, (dweight, dbias)))
    launches.linear_wgrads(layers, accumulate)
    for number, (segments, (dweight, dbias)) in enumerate(layers):
        wide, columns = torch.zeros_like(dweight, dtype=torch.float64), 0
        for x, dy in segments:
            wide += dy.double().t() @ x.double()
            columns += dy.double().sum(0)
        check(f"dweight {number}", dweight, wide + accumulate, terms=terms(segments))
        if dbias is not None:
            check(f"dbias {number}", dbias, columns + torch.full_like(dbias, accumulate, dtype=torch.float64))


def experts(random: Random, groups: int, n: int, k: int, transposed: bool) -> Tensor:
    """[E, N, K], stored [E, K, N] if transposed."""
    return random(groups, k, n).mT if transposed else random(groups, n, k)


def groups_of_rows(random: Random, counts: Sequence[int], spare: int) -> tuple[int, Tensor]:
    """How many rows there are, `spare` of which belong to no group, and where every group ends."""
    ends = torch.tensor(counts, device=random.device).cumsum(0).to(torch.int32)
    return sum(counts) + spare, ends


def grouped_linear(
    launches: ModuleType, random: Random, counts: Sequence[Sequence[int]], n: int, k: int,
    layouts: Sequence[str] = ("plain",) * 3, out: torch.dtype | None = None, accumulate: bool = False,
    bias: bool = True, transposed: bool = False, spare: int = 0,
) -> None:  # fmt: skip
    """Forward and dgrad of the first segment, wgrad of all; counts: rows of every group, per segment."""
    device, groups = random.device, len(counts[0])
    weight, b = experts(random, groups, n, k, transposed), random(groups, n) if bias else None
    segments = []
    for mine in counts:
        m, ends = groups_of_rows(random, mine, spare)
        segments.append((random(m, k, layout=layouts[0]), random(m, n, layout=layouts[1]), ends))
    x, dy, ends = segments[0]
    y, dx = (output(like.shape, random.dtype, device, layouts[2]) for like in (dy, x))
    launches.grouped_linear_fwd(x, weight, b, ends, y)
    launches.grouped_linear_dgrad(dy, weight, ends, dx)
    wide = torch.empty_like(y, dtype=torch.float64), torch.empty_like(dx, dtype=torch.float64)
    reference.grouped_linear_fwd(x.double(), weight.double(), None if b is None else b.double(), ends, wide[0])
    reference.grouped_linear_dgrad(dy.double(), weight.double(), ends, wide[1])
    check("y", y, wide[0])
    check("dx", dx, wide[1])
    start = 1.0 if accumulate else float("nan")
    stored = (groups, k, n) if transposed else (groups, n, k)
    outputs = [torch.full(shape, start, dtype=out or random.dtype, device=device) for shape in (stored, (groups, n))]
    if transposed:
        outputs[0] = outputs[0].mT
    wanted = [value.double() for value in outputs]
    launches.grouped_linear_wgrad(segments, (outputs[0], outputs[1] if bias else None), accumulate)
    reference.grouped_linear_wgrad([(x.double(), dy.double(), ends) for x, dy, ends in segments], wanted, accumulate)
    check("dweight", outputs[0], wanted[0], terms=terms(segments))
    if bias:
        check("dbias", outputs[1], wanted[1])


def grouped_gated(
    launches: ModuleType, random: Random, counts: Sequence[int], n: int, k: int, h: int, options: GateOptions,
    layouts: Sequence[str] = ("plain",) * 3, bias: bool = True, transposed: bool = False, spare: int = 0,
) -> None:  # fmt: skip
    """Forward, then the dgrad of the down projection from the same z."""
    groups, (m, ends) = len(counts), groups_of_rows(random, counts, spare)
    x, weight = random(m, k, layout=layouts[0]), experts(random, groups, 2 * h, k, transposed)
    b = random(groups, 2 * h) if bias else None
    z, gated = (output((m, width), random.dtype, random.device, layouts[2]) for width in (2 * h, h))
    launches.grouped_gated_fwd(x, weight, b, ends, options, z, gated)
    wide = [torch.empty_like(t, dtype=torch.float64) for t in (z, gated)]
    reference.grouped_linear_fwd(x.double(), weight.double(), None if b is None else b.double(), ends, wide[0])
    check("z", z, wide[0])
    check("h", gated, reference_grouped.gated(z.double(), options))
    dy, down = random(m, n, layout=layouts[0]), experts(random, groups, n, h, transposed)
    dz, again = (output((m, width), random.dtype, random.device, layouts[2]) for width in (2 * h, h))
    launches.grouped_gated_dgrad(dy, down, ends, z, options, dz, again)
    reference.grouped_gated_dgrad(dy.double(), down.double(), ends, z.double(), options, *wide)
    check("dz", dz, wide[0])
    check("h again", again, wide[1])


def adversarial_linear(
    launches: ModuleType, dtype: torch.dtype, device: str, kind: str, m: int, n: int, k: int
) -> None:
    """All products of a linear layer, of a grouped one, and of a gated MLP with inputs of that kind."""

    def random() -> Random:
        return Random(dtype, device, kind=kind)

    layouts = ("padded",) * 3
    linear_fwd(launches, random(), m, n, k, layouts)
    linear_dgrad(launches, random(), m, n, k, layouts)
    linear_wgrad(launches, random(), [m, 1, m], n, k, layouts, torch.float32, bias=False)
    linear_wgrad(launches, random(), [m], n, k, layouts, torch.float32, accumulate=kind != "denormal")
    linear_dgrad_sum(launches, random(), m, [n, n], k)
    linear_wgrads(launches, random(), [(n, k, [m]), (k, n, [m])])
    if kind != "denormal":  # both factors of some product would be tiny
        grouped_linear(launches, random(), [[m // 2, 0, m - m // 2]], n, k, out=torch.float32, bias=False)
    if kind == "special":  # gate times up leaves the range of the others
        gated_linear(launches, random(), m, n, k, n)
