"""What W costs and holds under sequence parallelism, on two CPU processes: inputs kept or gathered again, W in B.

A block of norm, gate, up and down, whose weights are cut over two ranks and its tokens between them (torch's
parallelize_module). A step is several microbatches; the W of each runs after the B of the next. No figure without a
check that the gradients are those of torch's own backward.

    python -m bench.tensor_parallel [--rounds 20]
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zbkern
from bench import ranks, report
from bench.split import saved_bytes
from bench.split_models import TorchMLP
from zbkern import testing
from zbkern.reporting import environment, machine_line

RANKS, WIDTH, TOKENS, BLOCKS, MICROBATCHES = 2, 512, 512, 2, 4  # tokens of a microbatch, of which each rank has half
PLAIN = "torch's backward"
VARIANTS: dict[str, dict[str, Any]] = {
    "inputs kept": {},
    "inputs kept, 1 W per collective of B": {"wgrads_per_collective": 1},
    "inputs gathered again in W": {"regather_inputs": True},
    "inputs gathered again, 1 W per collective of B": {"regather_inputs": True, "wgrads_per_collective": 1},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mlp = zbkern.restore(TorchMLP(width, 2 * width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def sequence_styles() -> dict[str, Any]:
    """How a module of norm and mlp (gate, up, down) is cut over ranks: weights, and tokens where none needs all."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    tokens = Shard(1)
    return {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=tokens),
    }


def parallelized(model: nn.Module, blocks: int, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    styles = sequence_styles()
    return parallelize_module(model, mesh, {f"{i}.{name}": s for i in range(blocks) for name, s in styles.items()})


def rows(rounds: int) -> list[dict]:
    """One row per way; both ranks measure, in the same order."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block(WIDTH) for _ in range(BLOCKS)])
    twin = parallelized(zbkern.convert(copy.deepcopy(plain)), BLOCKS, mesh)
    plain = parallelized(plain, BLOCKS, mesh)
    xs = [torch.randn(1, TOKENS // RANKS, WIDTH).requires_grad_() for _ in range(MICROBATCHES)]
    dys = [torch.randn(1, TOKENS // RANKS, WIDTH) for _ in range(MICROBATCHES)]
    queues = {name: zbkern.WGradQueue(**options) for name, options in VARIANTS.items()}

    def plain_step() -> None:
        for x, dy in zip(xs, dys, strict=True):
            plain(x).backward(dy)

    def step(queue: zbkern.WGradQueue) -> None:
        for key, (x, dy) in enumerate(zip(xs, dys, strict=True)):
            with queue.defer(key):
                twin(x).backward(dy)
            if key:
                queue.run(key - 1)
        queue.run()

    plain_step()
    held, saved = {}, {PLAIN: saved_bytes(lambda: plain(xs[0]), [*plain.parameters()])[1]}
    for name, queue in queues.items():
        twin.zero_grad()
        step(queue)
        held[name] = queue.peak_bytes
        for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
            testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())
        with queue.defer():
            saved[name] = saved_bytes(lambda: twin(xs[0]), [*twin.parameters()])[1]
    candidates: dict[str, Callable[[], list[Callable]]] = {PLAIN: lambda: [plain_step]}
    candidates |= {name: lambda queue=queue: [lambda: step(queue)] for name, queue in queues.items()}
    timings = testing.measure(candidates, rounds=rounds)
    first = timings[PLAIN]
    return [
        {
            "way": name,
            "step_ms": timing.median * 1e3,
            "of_torch": timing.ratio(first),
            "fastest_ms": min(timing.seconds) * 1e3,
            "f_to_b_bytes": saved[name],
            "held_bytes": held.get(name, 0),
        }
        for name, timing in timings.items()
    ]


COLUMNS = (
    "W: {way}; step, ms: {step_ms:.0f}; fastest, ms: {fastest_ms:.0f}; / torch's backward: {of_torch:.3f}; "
    "bytes kept from F to B: {f_to_b_bytes}; bytes held by W at most: {held_bytes}"
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds")
    report.add_out(parser)
    o = parser.parse_args(arguments)
    found = ranks.run(RANKS, rows, o.rounds)
    print(machine_line(environment()), end="\n\n")
    title = f"{BLOCKS} blocks of width {WIDTH}, {MICROBATCHES} microbatches of {TOKENS} tokens, 2 gloo ranks"
    print(report.table(title, COLUMNS, found))
    print("\n" + report.write_json("tensor_parallel", found, o.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
