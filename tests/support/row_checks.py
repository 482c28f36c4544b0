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
    layout: str = "plain", added: bool = False,
) -> None:  # fmt: skip
    """Forward, dgrad, and wgrad of two segments of partial sums.

    added: with a residual. The exact twin gets the sum as the launches must round it.
    """
    x, dy = random(rows, features, layout=layout), random(rows, features, layout=layout)
    weight = random(features) if weighted else None
    bias = random(features) if weighted and centered else None
    residual, dsummed = (random(rows, features, layout=layout) if added else None for _ in range(2))
    total = x if residual is None else checks.place(x + residual, layout)
    results = []
    for module, dtype in ((launches, random.dtype), (reference, torch.float64)):
        exact = module is reference and random.dtype != torch.float64
        values = (total if exact else x, dy, weight, bias, dsummed)
        tensors = [t.double() if exact and t is not None else t for t in values]
        device, statistics = x.device, wide_statistics(torch.float64 if exact else dtype)
        y, dx = (checks.output((rows, features), dtype, device, layout) for _ in range(2))
        mean, rstd = (torch.full((rows,), float("nan"), dtype=statistics, device=device) for _ in range(2))
        count = module.norm_partials(rows, features, device)
        shape = (1 + centered, count, features)
        partials = torch.full(shape, float("nan"), dtype=statistics, device=device) if weighted else None
        sums, normed = (), tensors[0]
        if residual is not None and not exact:
            normed = checks.output((rows, features), dtype, device, layout)
            sums = (residual, normed)
        if centered:
            module.layer_norm_fwd(tensors[0], *tensors[2:4], 1e-3, y, mean, rstd, *sums)
            module.layer_norm_dgrad(tensors[1], normed, tensors[2], mean, rstd, dx, partials, dsummed=tensors[4])
        else:
            module.rms_norm_fwd(tensors[0], tensors[2], 1e-3, y, rstd, *sums)
            module.rms_norm_dgrad(tensors[1], normed, tensors[2], rstd, dx, partials, dsummed=tensors[4])
        found = {"y": y, "dx": dx, "rstd": rstd} | ({"mean": mean} if centered else {})
        if residual is not None:
            found["summed"] = normed
        if partials is not None:
            outputs = [torch.ones(features, dtype=statistics, device=device) for _ in range(1 + centered)]
            module.norm_wgrad([(partials,), (partials,)], outputs, True)
            found |= dict(zip(("dweight", "dbias"), outputs, strict=False))
        results.append(found)
    for name, got in results[0].items():
        checks.check(name, got, results[1][name])


ELEMENTWISE = {"activation_fwd": (1, 1), "activation_bwd": (2, 1), "gated_fwd": (2, 1), "gated_bwd": (3, 3)}
"""Launch -> how many inputs before the activation, how many outputs after it."""


def elementwise(
    launches: ModuleType, random: Random, name: str, activation: str, rows: int, columns: int, layout: str = "plain"
) -> None:
    inputs, outputs = ELEMENTWISE[name]
    values = [random(rows, columns, layout=layout) for _ in range(inputs)]
    got = [checks.output((rows, columns), random.dtype, random.device, layout) for _ in range(outputs)]
    wanted = [torch.empty(rows, columns, dtype=torch.float64, device=random.device) for _ in range(outputs)]
    getattr(launches, name)(*values, activation, *got)
    getattr(reference, name)(*(v.double() for v in values), activation, *wanted)
    for index, (mine, other) in enumerate(zip(got, wanted, strict=True)):
        checks.check(f"output {index} of {name}", mine, other)


def rotary(
    launches: ModuleType, random: Random, shape: Sequence[int], half: int, interleaved: bool, wide: bool = True,
    layout: str = "plain",
) -> None:  # fmt: skip
    """Forward and dgrad of [batch, tokens, heads, size]. wide: cos and sin are float32. layout: of all columns."""
    flat = (shape[0] * shape[1] * shape[2], shape[3])
    x, dy = (random(*flat, layout=layout) for _ in range(2))
    y, dx = (checks.output(flat, random.dtype, random.device, layout) for _ in range(2))
    angles = torch.randn(shape[1], half, generator=random.generator)
    kind = torch.float32 if wide else random.dtype
    cos, sin = (t.to(kind).to(random.device) for t in (angles.cos(), angles.sin()))
    launches.rotary_fwd(x.view(shape), cos, sin, interleaved, y.view(shape))
    launches.rotary_dgrad(dy.view(shape), cos, sin, interleaved, dx.view(shape))
    for name, got, given, sign in (("y", y, x, 1), ("dx", dx, dy, -1)):
        wanted = reference.rotated(given.view(shape).double(), cos.double(), sign * sin.double(), interleaved)
        checks.check(name, got, wanted.view(flat))


def embedding(
    launches: ModuleType, random: Random, rows: Sequence[int], vocabulary: int, features: int,
    accumulate: bool = False, padding_idx: int | None = None,
) -> None:  # fmt: skip
    """Forward of the first segment; wgrad of all, where some rows of the weight are asked for often and some never."""
    weight, segments = random(vocabulary, features), []
    for count in rows:
        indices = torch.randint(max(vocabulary // 2, 1), (count,), generator=random.generator).to(random.device)
        segments.append((indices, random(count, features)))
    y = checks.output(segments[0][1].shape, random.dtype, random.device)
    launches.embedding_fwd(segments[0][0], weight, y)
    checks.check("y", y, weight[segments[0][0]].double())
    start = 1.0 if accumulate else float("nan")
    dweight = torch.full((vocabulary, features), start, device=random.device)
    wanted = dweight.double()
    launches.embedding_wgrad(segments, (dweight,), accumulate, padding_idx=padding_idx)
    wide = [(indices, dy.double()) for indices, dy in segments]
    reference.embedding_wgrad(wide, (wanted,), accumulate, padding_idx=padding_idx)
    checks.check("dweight", dweight, wanted)


def cross_entropy(
    launches: ModuleType, random: Random, rows: Sequence[int], vocabulary: int, features: int,
    options: spec.CrossEntropyOptions, bias: bool = False, accumulate: bool = False,
) -> None:  # fmt: skip
    """Loss and dx of every segment, then the wgrad of all."""
    device, segments, wide_segments = random.device, [], []
    weight, b = random(vocabulary, features), random(vocabulary) if bias else None
    wide_weight, wide_b = weight.double(), None if b is None else b.double()
    for count in rows:
        x = random(count, features)
        target = torch.randint(vocabulary, (count,), generator=random.generator).to(device)
        target[::5] = options.ignore_index
        loss, lse = (torch.full((count,), float("nan"), device=device) for _ in range(2))
        dx = checks.output((count, features), random.dtype, device)
        launches.cross_entropy_fwd(x, weight, b, target, options, loss, lse, dx)
        exact = [torch.empty(count, dtype=torch.float64, device=device) for _ in range(2)]
        wide_dx = torch.empty(count, features, dtype=torch.float64, device=device)
        reference.cross_entropy_fwd(x.double(), wide_weight, wide_b, target, options, *exact, wide_dx)
        kept = target != options.ignore_index
        checks.check("loss", loss[kept], exact[0][kept], 2e-3)
        checks.check("dx", dx, wide_dx)
        dloss = torch.rand(count, generator=random.generator).to(device)
        segments.append((x, target, lse, dloss))
        wide_segments.append((x.double(), target, exact[1], dloss.double()))
    start = 1.0 if accumulate else float("nan")
    outputs = [torch.full(shape, start, device=device) for shape in ((vocabulary, features), (vocabulary,))]
    wanted = [value.double() for value in outputs]
    targets = (outputs[0], outputs[1] if bias else None)
    launches.cross_entropy_wgrad(segments, targets, accumulate, weight=weight, bias=b, options=options)
    reference.cross_entropy_wgrad(
        wide_segments, wanted, accumulate, weight=wide_weight, bias=wide_b, options=options
    )  # fmt: skip
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(random.dtype)  # dz is rounded before its product
    checks.check("dweight", outputs[0], wanted[0], tolerance)
    if bias:
        checks.check("dbias", outputs[1], wanted[1], tolerance)


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
