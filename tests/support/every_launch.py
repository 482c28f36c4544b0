"""Every raw launch once, at one shape: for what must hold of all of them, whatever they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.launch_checks import Random
from zbkern.kernels.spec import AttentionOptions, CrossEntropyOptions, GateOptions


class Case(NamedTuple):
    """run() launches it on `inputs`. start: what `outputs` hold before, nan where they are overwritten."""

    run: Callable[[], None]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    start: float = float("nan")

    def results(self) -> list[Tensor]:
        for output in self.outputs:
            output.fill_(self.start)
        self.run()
        return [output.clone() for output in self.outputs]

    def check_repeats(self) -> None:
        """The same bits in every run."""
        first = self.results()
        assert all(result.isfinite().all() for result in first)
        for _ in range(3):
            assert all(torch.equal(one, two) for one, two in zip(self.results(), first, strict=True))

    def check_graph(self) -> None:
        """A CUDA graph of it works on what its inputs hold when it is replayed."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.results()  # compiles
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        for factor in (1.0, -0.5):
            for tensor in self.inputs:
                tensor.mul_(factor)
            expected = self.results()
            for output in self.outputs:
                output.fill_(self.start)
            graph.replay()
            assert all(torch.equal(got, wanted) for got, wanted in zip(self.outputs, expected, strict=True))


def cases(
    launches: ModuleType, random: Random, m: int = 1000, n: int = 528, k: int = 784, indices: torch.dtype = torch.int64
) -> dict[str, Case]:
    """By the name of the launch, all that Triton has: M=m, N=H=n, K=k; W of two segments, added to what is there.

    Tests on a GPU run these sizes, whose kernels `python -m bench.gpu_prepare` compiles.
    """
    found: dict[str, Case] = {}
    x, dx, dx_too = random(m, k), random(m, k), random(m, k)
    dy, z, y, gate, up, gated = (random(m, n) for _ in range(6))
    weight, weight_too, bias, gain, shift = random(n, k), random(n, k), random(n), random(k), random(k)
    wide = {"device": random.device, "dtype": torch.float32}
    dweight, dweight_too = random.empty(n, k), random.empty(n, k)
    dbias, dbias_too = torch.empty(n, **wide), torch.empty(n, **wide)
    mean, rstd = torch.full((m,), 0.1, **wide), torch.full((m,), 1.5, **wide)

    def add(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *arguments: object, **more: object) -> None:
        start = 1.0 if "wgrad" in name else float("nan")
        launch = getattr(launches, name)
        found[name] = Case(lambda: launch(*arguments, **more), inputs, outputs, start)

    add("linear_fwd", [x, weight, bias], [y, z], x, weight, bias, y, "gelu", z)
    add("linear_dgrad", [dy, weight], [dx], dy, weight, dx)
    add("linear_dgrad_sum", [dy, weight, gate, weight_too], [dx], [(dy, weight), (gate, weight_too)], dx)
    segments = [(x, dy), (dx, gate)]
    add("linear_wgrad", [x, dy, dx, gate], [dweight, dbias], segments, (dweight, dbias), True)
    layers = [(segments, (dweight, dbias)), ([(x, up)], (dweight_too, None)), ([(x, up)], (None, dbias_too))]
    add("linear_wgrads", [x, dy, dx, gate, up], [dweight, dweight_too, dbias, dbias_too], layers, True)

    add("activation_fwd", [gate], [y], gate, "silu", y)
    add("activation_bwd", [dy, gate], [y], dy, gate, "silu", y)
    add("gated_fwd", [gate, up], [y], gate, up, "silu", y)
    add("gated_bwd", [dy, gate, up], [y, z, gated], dy, gate, up, "silu", y, z, gated)
    weights, targets = (weight, weight_too, bias, None), (y, z, gated)
    add("gated_linear_fwd", [x, weight, weight_too, bias], targets, x, *weights, "silu", *targets)
    # down [k, n]: dgrad to [m, n]
    add("gated_linear_dgrad", [x, weight, gate, up], targets, x, weight.t(), gate, up, "silu", *targets)

    ends = torch.tensor([m // 3, m // 3, m], dtype=torch.int32, device=random.device)
    experts, biases = random(3 * n, k).view(3, n, k), random(3, n)
    of_experts = random.empty(3 * n, k).view(3, n, k), random.empty(3, n)
    add("grouped_linear_fwd", [x, experts, biases], [y], x, experts, biases, ends, y)
    add("grouped_linear_dgrad", [dy, experts], [dx], dy, experts, ends, dx)
    add("grouped_linear_wgrad", [x, dy], of_experts, [(x, dy, ends)], of_experts, True)
    twice, gate = torch.cat([experts, experts.flip(1)], 1), GateOptions(interleaved=True, limit=1.0, offset=1.0)
    before, after = random(m, 2 * n), random(m, 2 * n)
    add("grouped_gated_fwd", [x, twice], [after, y], x, twice, None, ends, gate, after, y)
    # experts.mT [3, k, n]: dgrad to [m, n]
    add("grouped_gated_dgrad", [x, experts, before], [after, y], x, experts.mT, ends, before, gate, after, y)

    rows = torch.arange(m, device=random.device) * (n - 1) % n
    some, others = rows.to(indices), (rows // 2).to(indices)
    add("embedding_fwd", [weight], [dx], some, weight, dx)
    add("embedding_wgrad", [x, dx_too], [dweight], [(some, x), (others, dx_too)], (dweight,), True)

    partials = [torch.empty(2, launches.norm_partials(m, k, x.device), k, **wide) for _ in range(2)]
    means = torch.empty(m, **wide), torch.empty(m, **wide)
    outputs = [dx, *means, y_k := random(m, k)]
    add("norm_fwd", [x, gain, shift, dx_too], outputs, x, gain, shift, 1e-5, dx, *means, dx_too, y_k)
    add("norm_dgrad", [x, dx_too, gain], [dx, partials[0]], x, dx_too, gain, mean, rstd, dx, partials[0])
    # not as many as a backend would like: what is drawn from here on must not depend on it
    sums, kept = [torch.empty(k, **wide) for _ in range(2)], [torch.rand(2, 7, k, **wide) for _ in range(2)]
    add("norm_wgrad", kept, sums, [(part,) for part in kept], sums, True)

    q, k_, v, dq, dk, dv, dout, out = (random(m, 2 * 16).view(m, 2, 16) for _ in range(8))
    lengths = torch.tensor([0, m // 3, m], dtype=torch.int32, device=random.device)
    options = AttentionOptions(0.25, True, None, lengths, lengths)
    lse = torch.empty(2, m, **wide)
    add("attention_fwd", [q, k_, v], [out, lse], q, k_, v, options, out, lse)
    level, y_kept = torch.full_like(lse, 3.0), random(m, 32).view(m, 2, 16)
    add("attention_dgrad", [dout, q, k_, v], [dq, dk, dv], dout, q, k_, v, y_kept, level, options, dq, dk, dv)

    angles = torch.rand(m, 8, **wide)
    turns, turned = (angles.cos(), angles.sin()), random(m, 32).view(1, m, 2, 16)
    add("rotary_fwd", [q], [turned], q[None], *turns, False, turned)
    add("rotary_dgrad", [q], [turned], q[None], *turns, False, turned)

    loss, found_lse, dloss = (torch.rand(m, **wide) for _ in range(3))
    counted, head = CrossEntropyOptions(chunk=max(m // 2, 1)), {"weight": weight, "bias": bias}
    outputs = [loss, found_lse, dx]
    add("cross_entropy_fwd", [x, weight, bias], outputs, x, weight, bias, rows, counted, *outputs)
    lines = torch.full((m,), 9.0, **wide)
    segments_of_loss, options_of_loss = [(x, rows, lines, dloss)], {**head, "options": counted}
    outputs = [dweight, dbias]
    add("cross_entropy_wgrad", [x, dloss], outputs, segments_of_loss, outputs, True, **options_of_loss)

    parts, short, scales = torch.empty(1, **wide), random.empty(k, m, dtype=torch.float8_e5m2), torch.empty(k, **wide)
    add("float8_amax", [x], [parts], x, parts)
    add("float8_cast", [x], [short, scales], x.t(), None, True, short, scales)
    return found
