"""Raw launches of any implementation on any device against the reference in float64: what the emulator's tests and
the GPU's tests share. Outputs start as nan inside larger buffers: every element is written, and none beside them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zbkern import testing
from zbkern.kernels import reference
from zbkern.kernels.reference.grouped import gated as reference_gated
from zbkern.kernels.spec import GateOptions

LAYOUTS = ("plain", "padded", "transposed", "odd", "step")
PLAIN = ("plain",) * 3


def place(values: Tensor, layout: str) -> Tensor:
    """The same matrix, or [T, H, D] of heads, laid out in a larger buffer of nan.

    padded: longer rows, aligned. transposed: the first two dimensions are the other way round in memory. joined: heads
    are beside others in one projection's output. odd: longer rows, nothing aligned. step: every second column.
    expanded: the first row for all, as the gradient of a sum over rows.
    """
    count, columns = len(values), values.shape[-1]

    def room(*shape: int) -> Tensor:
        return values.new_full(shape, float("nan"))

    if layout == "expanded":
        return values[:1].expand(values.shape)
    if layout == "transposed":
        view = room(values.shape[1], count + 8, *values.shape[2:])[:, :count].transpose(0, 1)
    elif layout == "padded":
        view = room(count, columns + 16)[:, :columns]
    elif layout == "joined":
        view = room(count, 3 * values.shape[1], columns)[:, values.shape[1] : 2 * values.shape[1]]
    elif layout == "odd":
        view = room(*values.shape[:-1], columns + 3)[..., 1 : columns + 1]
    elif layout == "step":
        view = room(*values.shape[:-1], 2 * columns)[..., ::2]
    else:
        view = torch.empty_like(values)
    return view.copy_(values)


def output(
    shape: Sequence[int], dtype: torch.dtype, device: str, layout: str = "plain", value: float = float("nan")
) -> Tensor:
    return place(torch.full(tuple(shape), value, dtype=dtype, device=device), layout)


def check(
    name: str, got: Tensor, expected: Tensor, tolerance: float | None = None, terms: int = 0, scale: float = 0.0
) -> None:
    """What is not finite must be so in the same places; the rest is compared by value. terms, scale: as in testing."""
    expected = expected.to(got.device)
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{name}: values that are not finite are in other places"
    testing.assert_close(got.where(finite, 0), expected.where(finite, 0), name, tolerance, scale, terms)
    if got._base is not None:
        untouched = int(got._base.isnan().sum()) - int(got.isnan().sum())
        assert untouched == got._base.numel() - got.numel(), f"{name}: wrote beside its output"


def compare(
    launches: ModuleType | None, name: str, outputs: dict[str, Tensor | None], *arguments: Any,
    tolerance: float | None = None, terms: int = 0, scale: float = 0.0, **options: Any,
) -> dict[int, Tensor]:  # fmt: skip
    """Launches it, and the reference on float64 copies of all that it is given, and holds `outputs` against the
    copies, which are returned by the id of what they are of. launches: None where it has run."""
    copies: dict[int, Tensor] = {}

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return copies.setdefault(id(value), value.to(torch.float64, copy=True))
        return [wide(each) for each in value] if isinstance(value, (list, tuple)) else value

    wide_arguments, wide_options = wide(arguments), {key: wide(value) for key, value in options.items()}
    if launches is not None:
        getattr(launches, name)(*arguments, **options)
    getattr(reference, name)(*wide_arguments, **wide_options)
    for label, got in outputs.items():
        if got is not None:
            check(label, got, copies[id(got)], tolerance, terms, scale)
    return copies


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

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Room for results."""
        return torch.empty(*shape, dtype=dtype, device=self.device)


def linear_fwd(
    launches: ModuleType, random: Random, m: int, n: int, k: int, layouts: Sequence[str] = PLAIN,
    bias: bool = False, activation: str | None = None, keep: bool = False,
) -> None:  # fmt: skip
    x, weight, b = random(m, k, layout=layouts[0]), random(n, k, layout=layouts[1]), random(n) if bias else None
    y, z = (output((m, n), random.dtype, random.device, layouts[2]) for _ in range(2))
    z = z if keep else None
    compare(launches, "linear_fwd", {"z": z, "y": y}, x, weight, b, y, activation, z)


def linear_dgrad(launches: ModuleType, random: Random, m: int, n: int, k: int, layouts: Sequence[str] = PLAIN) -> None:
    dy, weight = random(m, n, layout=layouts[0]), random(n, k, layout=layouts[1])
    dx = output((m, k), random.dtype, random.device, layouts[2])
    compare(launches, "linear_dgrad", {"dx": dx}, dy, weight, dx)


def linear_wgrad(
    launches: ModuleType, random: Random, rows: Sequence[int], n: int, k: int,
    layouts: Sequence[str] = PLAIN, out: torch.dtype | None = None, accumulate: bool = False,
    bias: bool = True, weight: bool = True,
) -> None:  # fmt: skip
    segments, outputs = w_of(random, rows, n, k, layouts, out or random.dtype, accumulate, bias, weight)
    named = dict(zip(("dweight", "dbias"), outputs, strict=True))
    compare(launches, "linear_wgrad", named, segments, outputs, accumulate, terms=terms(segments))


def w_of(
    random: Random, rows: Sequence[int], n: int, k: int, layouts: Sequence[str], out: torch.dtype, accumulate: bool,
    bias: bool = True, weight: bool = True,
) -> tuple[list[tuple[Tensor, ...]], tuple[Tensor | None, ...]]:  # fmt: skip
    """The segments and outputs of a W; outputs are 1 where they are added to."""
    segments = [(random(m, k, layout=layouts[0]), random(m, n, layout=layouts[1])) for m in rows]
    start = 1.0 if accumulate else float("nan")
    dweight = output((n, k), out, random.device, layouts[2], start) if weight else None
    return segments, (dweight, torch.full((n,), start, dtype=out, device=random.device) if bias else None)


def linear_dgrad_sum(
    launches: ModuleType, random: Random, m: int, ns: Sequence[int], k: int, layouts: Sequence[str] = PLAIN
) -> None:
    segments = [(random(m, n, layout=layouts[0]), random(n, k, layout=layouts[1])) for n in ns]
    dx = output((m, k), random.dtype, random.device, layouts[2])
    compare(launches, "linear_dgrad_sum", {"dx": dx}, segments, dx)


def gated_linear(
    launches: ModuleType, random: Random, m: int, n: int, k: int, h: int, layouts: Sequence[str] = PLAIN,
    activation: str = "silu", bias: bool = False,
) -> None:  # fmt: skip
    """Forward, then the dgrad of the down projection from the same gate and up."""
    x, weights = random(m, k, layout=layouts[0]), [random(h, k, layout=layouts[1]) for _ in range(2)]
    biases = [random(h) if bias else None for _ in range(2)]
    gate, up, gated = outputs = [output((m, h), random.dtype, random.device, layouts[2]) for _ in range(3)]
    named = {"gate": gate, "up": up, "h": gated}
    compare(launches, "gated_linear_fwd", named, x, *weights, *biases, activation, *outputs)
    dy, down = random(m, n, layout=layouts[0]), random(n, h, layout=layouts[1])
    outputs = [output((m, h), random.dtype, random.device, layouts[2]) for _ in range(3)]
    named = dict(zip(("dgate", "dup", "h again"), outputs, strict=True))
    compare(launches, "gated_linear_dgrad", named, dy, down, gate, up, activation, *outputs)


def linear_wgrads(
    launches: ModuleType, random: Random, shapes: Sequence[tuple[int, int, Sequence[int]]],
    layouts: Sequence[str] = PLAIN, accumulate: bool = False, bias: bool = True,
) -> None:  # fmt: skip
    """Several weights at once; shapes: (N, K, rows of every segment) of each."""
    layers = [w_of(random, rows, n, k, layouts, torch.float32, accumulate, bias) for n, k, rows in shapes]
    copies = compare(launches, "linear_wgrads", {}, layers, accumulate)
    for number, (segments, outputs) in enumerate(layers):
        for name, got in zip(("dweight", "dbias"), outputs, strict=True):
            if got is not None:
                check(f"{name} {number}", got, copies[id(got)], terms=terms(segments))


def experts(random: Random, groups: int, n: int, k: int, transposed: bool) -> Tensor:
    """[E, N, K], stored [E, K, N] if transposed."""
    return random(groups, k, n).mT if transposed else random(groups, n, k)


def groups_of_rows(random: Random, counts: Sequence[int], spare: int) -> tuple[int, Tensor]:
    """How many rows there are, `spare` of which belong to no group, and where every group ends."""
    ends = torch.tensor(counts, device=random.device).cumsum(0).to(torch.int32)
    return sum(counts) + spare, ends


def grouped_linear(
    launches: ModuleType, random: Random, counts: Sequence[Sequence[int]], n: int, k: int,
    layouts: Sequence[str] = PLAIN, out: torch.dtype | None = None, accumulate: bool = False,
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
    compare(launches, "grouped_linear_fwd", {"y": y}, x, weight, b, ends, y)
    compare(launches, "grouped_linear_dgrad", {"dx": dx}, dy, weight, ends, dx)
    stored, start = (groups, k, n) if transposed else (groups, n, k), 1.0 if accumulate else float("nan")
    dweight, dbias = (
        torch.full(shape, start, dtype=out or random.dtype, device=device) for shape in (stored, (groups, n))
    )
    outputs = dweight.mT if transposed else dweight, dbias if bias else None
    named = dict(zip(("dweight", "dbias"), outputs, strict=True))
    compare(launches, "grouped_linear_wgrad", named, segments, outputs, accumulate, terms=terms(segments))


def grouped_gated(
    launches: ModuleType, random: Random, counts: Sequence[int], n: int, k: int, h: int, options: GateOptions,
    layouts: Sequence[str] = PLAIN, bias: bool = True, transposed: bool = False, spare: int = 0,
) -> None:  # fmt: skip
    """Forward, then the dgrad of the down projection from the same z; h is the gate of z as it was rounded."""
    groups, (m, ends) = len(counts), groups_of_rows(random, counts, spare)
    x, weight = random(m, k, layout=layouts[0]), experts(random, groups, 2 * h, k, transposed)
    b = random(groups, 2 * h) if bias else None
    z, gated = (output((m, width), random.dtype, random.device, layouts[2]) for width in (2 * h, h))
    compare(launches, "grouped_gated_fwd", {"z": z}, x, weight, b, ends, options, z, gated)
    check("h", gated, reference_gated(z.double(), options))
    dy, down = random(m, n, layout=layouts[0]), experts(random, groups, n, h, transposed)
    dz, again = (output((m, width), random.dtype, random.device, layouts[2]) for width in (2 * h, h))
    compare(launches, "grouped_gated_dgrad", {"dz": dz, "h again": again}, dy, down, ends, z, options, dz, again)


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
