"""Launches that work row by row, of any implementation on any device, against the reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from tests.support import launch_checks as checks
from zbkern.kernels import reference, spec

Random = checks.Random


def wide_statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def norm(
    launches: ModuleType, random: Random, rows: int, features: int, centered: bool, weighted: bool = True,
    layout: str = "plain", added: bool = False, scale: float = 0.0, rounded: float = 0.0,
) -> None:  # fmt: skip
    """Forward, dgrad, and wgrad of two segments of partial sums.

    added: with a residual. The exact twin gets the sum as the launches keep it, which may be off by `rounded`.
    """
    x, dy = random(rows, features, layout=layout), random(rows, features, layout=layout)
    weight = random(features) if weighted else None
    bias = random(features) if weighted and centered else None
    residual, dsummed = (random(rows, features, layout=layout) if added else None for _ in range(2))
    y, dx, summed = (checks.output((rows, features), random.dtype, random.device, layout) for _ in range(3))
    wide = {"dtype": wide_statistics(random.dtype), "device": random.device}
    mean = torch.full((rows,), float("nan"), **wide) if centered else None
    rstd, sums, normed = torch.full((rows,), float("nan"), **wide), (), x
    if residual is not None:
        sums, normed = (residual, summed), summed
    launches.norm_fwd(x, weight, bias, 1e-3, y, mean, rstd, *sums)
    if residual is not None:
        torch.testing.assert_close(summed, x + residual, rtol=rounded, atol=0)
    outputs = {"y": y, "rstd": rstd} | ({"mean": mean} if centered else {})
    checks.compare(None, "norm_fwd", outputs, normed, weight, bias, 1e-3, y, mean, rstd, scale=scale)

    count = launches.norm_partials(rows, features, x.device)
    partials, one = (torch.full((1 + centered, p, features), float("nan"), **wide) for p in (count, 1))
    launches.norm_dgrad(dy, normed, weight, mean, rstd, dx, partials if weighted else None, dsummed)
    arguments = (dy, normed, weight, mean, rstd, dx, one if weighted else None, dsummed)
    terms = scale
    if features == 1 and not centered:  # the gradient is what is left of two such terms, which nearly cancel
        terms = max(scale, float((dy.double() * rstd[:, None] * (1 if weight is None else weight)).abs().max()))
    copies = checks.compare(None, "norm_dgrad", {"dx": dx}, *arguments, scale=terms)
    if weighted:
        sums = [torch.ones(features, **wide) for _ in range(1 + centered)]
        launches.norm_wgrad([(partials,), (partials,)], sums, True)
        for label, got, half in zip(("dweight", "dbias"), sums, copies[id(one)], strict=False):
            checks.check(label, got, 1 + 2 * half[0], scale=scale)


ELEMENTWISE = {"activation_fwd": (1, 1), "activation_bwd": (2, 1), "gated_fwd": (2, 1), "gated_bwd": (3, 3)}
"""Launch -> how many inputs before the activation, how many outputs after it."""


def elementwise(
    launches: ModuleType, random: Random, name: str, activation: str, rows: int, columns: int, layout: str = "plain"
) -> None:
    inputs, outputs = ELEMENTWISE[name]
    values = [random(rows, columns, layout=layout) for _ in range(inputs)]
    got = [checks.output((rows, columns), random.dtype, random.device, layout) for _ in range(outputs)]
    named = {f"output {index} of {name}": each for index, each in enumerate(got)}
    checks.compare(launches, name, named, *values, activation, *got)


def rotary(
    launches: ModuleType, random: Random, shape: Sequence[int], half: int, interleaved: bool, wide: bool = True,
    layout: str = "plain",
) -> None:  # fmt: skip
    """Forward and dgrad of [batch, tokens, heads, size]. wide: cos and sin are float32. layout: of all columns."""
    flat = (shape[0] * shape[1] * shape[2], shape[3])
    angles = torch.randn(shape[1], half, generator=random.generator)
    kind = torch.float32 if wide else random.dtype
    cos, sin = (t.to(kind).to(random.device) for t in (angles.cos(), angles.sin()))
    for name, sign in (("rotary_fwd", 1), ("rotary_dgrad", -1)):
        x, y = random(*flat, layout=layout), checks.output(flat, random.dtype, random.device, layout)
        getattr(launches, name)(x.view(shape), cos, sin, interleaved, y.view(shape))
        wanted = reference.rotated(x.view(shape).double(), cos.double(), sign * sin.double(), interleaved)
        checks.check(name, y, wanted.view(flat))


def embedding(
    launches: ModuleType, random: Random, rows: Sequence[int], vocabulary: int, features: int,
    accumulate: bool = False, padding_idx: int | None = None, out: torch.dtype = torch.float32,
    layouts: Sequence[str] = ("plain", "plain"), kind: torch.dtype = torch.int64,
) -> torch.Tensor:  # fmt: skip
    """Forward of the first segment; wgrad of all, where some rows of the weight are asked for often and some never;
    returns dweight. layouts: of dy and dweight. kind: of the indices."""
    weight, segments = random(vocabulary, features), []
    for count in rows:
        indices = torch.randint(max(vocabulary // 2, 1), (count,), generator=random.generator).to(kind)
        segments.append((indices.to(random.device), random(count, features, layout=layouts[0])))
    y = checks.output(segments[0][1].shape, random.dtype, random.device)
    launches.embedding_fwd(segments[0][0], weight, y)
    checks.check("y", y, weight[segments[0][0]].double())
    start = 1.0 if accumulate else float("nan")
    dweight = checks.output((vocabulary, features), out, random.device, layouts[1], start)
    arguments = (segments, (dweight,), accumulate)
    checks.compare(launches, "embedding_wgrad", {"dweight": dweight}, *arguments, padding_idx=padding_idx)
    return dweight


def cross_entropy(
    launches: ModuleType, random: Random, rows: Sequence[int], vocabulary: int, features: int,
    options: spec.CrossEntropyOptions, bias: bool = False, accumulate: bool = False,
    tolerances: tuple[float | None, ...] = (2e-3, None, None), scale: float = 0.0, layout: str = "plain",
) -> None:  # fmt: skip
    """Loss and dx of every segment, then the wgrad of all. tolerances: of the loss, of dx, of the weight's gradient.
    layout: of the weight."""
    device, segments = random.device, []
    weight, b = random(vocabulary, features, layout=layout), random(vocabulary) if bias else None
    on_loss, on_dx, on_weight = tolerances
    for count in rows:
        x = random(count, features)
        target = torch.randint(vocabulary, (count,), generator=random.generator).to(device)
        target[::5] = options.ignore_index
        loss, lse = (torch.full((count,), float("nan"), device=device) for _ in range(2))
        dx = checks.output((count, features), random.dtype, device)
        arguments = (x, weight, b, target, options, loss, lse, dx)
        copies = checks.compare(launches, "cross_entropy_fwd", {"dx": dx}, *arguments, tolerance=on_dx, scale=scale)
        kept = target != options.ignore_index
        checks.check("loss", loss[kept], copies[id(loss)][kept], on_loss, scale=scale)
        segments.append((x, target, lse, torch.rand(count, generator=random.generator).to(device)))
    start = 1.0 if accumulate else float("nan")
    dweight, dbias = (torch.full(shape, start, device=device) for shape in ((vocabulary, features), (vocabulary,)))
    if on_weight is None:  # dz is rounded before its product
        on_weight = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(random.dtype)
    outputs, named = (dweight, dbias if bias else None), {"dweight": dweight, "dbias": dbias if bias else None}
    head = {"weight": weight, "bias": b, "options": options, "tolerance": on_weight, "scale": scale}
    checks.compare(launches, "cross_entropy_wgrad", named, segments, outputs, accumulate, **head)


def adversarial(launches: ModuleType, dtype: torch.dtype, device: str, kind: str, rows: int, features: int) -> None:
    """Norms, rotary embedding and embedding with inputs of that kind; a head with its loss where one row is nan."""

    def random() -> Random:
        return Random(dtype, device, kind=kind)

    for centered in (False, True):
        norm(launches, random(), rows, features, centered)
    rotary(launches, random(), (1, rows, 2, features), features // 2, False)
    embedding(launches, random(), [rows, rows], rows, features)
    normal = Random(dtype, device, scale=0.3)
    x, weight, target = normal(rows, features), normal(features, features), torch.arange(rows, device=device) % features
    results = []
    for poison in (0.0, float("nan")):
        x[1] += poison
        loss, lse, dx = torch.empty(rows, device=device), torch.empty(rows, device=device), torch.empty_like(x)
        launches.cross_entropy_fwd(x, weight, None, target, spec.CrossEntropyOptions(), loss, lse, dx)
        results.append((loss, lse, dx))
    for clean, beside_nan in zip(*results, strict=True):
        assert beside_nan[1].isnan().all()
        beside_nan[1] = clean[1]
        assert torch.equal(beside_nan, clean)


def float8(
    launches: ModuleType, random: Random, rows: int, columns: int, kind: torch.dtype, power_of_2: bool = False,
    parts: int = 0, layout: str = "plain", edges: bool = False,
) -> None:  # fmt: skip
    """The bits of a cast to 8 bits, and of its scales, of rows or of all in so many parts. edges: rows whose scales lie
    about a power of two."""
    x = random(rows, columns, layout=layout)
    if edges:
        steps = torch.arange(-4, rows - 4, device=random.device)[:, None]
        x[:, :1] = torch.nextafter(torch.exp2(steps % 37.0) * torch.finfo(kind).max, (steps % 3 - 1) * 1e38)
        x[:, 1:] *= 2.0**-40
    y, wanted = (torch.ones(rows, columns + 3, device=random.device).to(kind)[:, :columns] for _ in range(2))
    scales = [torch.full((rows,) if not parts else (), -1.0, device=random.device) for _ in range(2)]
    amax = torch.full((parts,), -1.0, device=random.device) if parts else None
    if amax is not None:
        launches.float8_amax(x, amax)
        torch.testing.assert_close(amax.max(), x.abs().max().float(), rtol=0, atol=0, equal_nan=True)
        assert not (amax < 0).any()
    launches.float8_cast(x, amax, power_of_2, y, scales[0])
    reference.float8_cast(x, amax, power_of_2, wanted, scales[1])
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
    bits, numbers = [each.view(torch.uint8).clone() for each in (y, wanted)], wanted.float().isnan().logical_not()
    assert torch.equal(y.float().isnan(), ~numbers), "nan is in other places"
    assert torch.equal(bits[0][numbers], bits[1][numbers]), "bits differ"
    assert (y._base[:, columns:].float() == 1).all(), "wrote beside its output"
