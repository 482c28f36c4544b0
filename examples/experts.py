"""A small mixture of experts on 2 stages x 2 expert ranks, whose all-to-alls are hidden by passes beside each other.

    torchrun --nproc-per-node 4 examples/experts.py

Every rank has half of the experts of its stage's layers, and its own tokens. DualPipe-V runs a forward of one chunk
beside a backward of the other: while an all-to-all of one is in flight the other computes. The loss is that of the same
schedule with its passes one after the other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbkern
from zbkern.pipeline import Pipeline, Schedule, schedules

STAGES, EXPERT_RANKS, MICROBATCHES, STEPS = 2, 2, 8, 5
WIDTH, EXPERTS, TOKENS = 32, 4, 64


class Layer(nn.Module):
    def __init__(self, number: int, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(number)  # the router and the linear are the same on all ranks of the group
        self.linear = zbkern.nn.Linear(WIDTH, WIDTH)
        router = zbkern.nn.Linear(WIDTH, EXPERTS, bias=False)
        torch.manual_seed(100 + number * EXPERT_RANKS + mesh.get_local_rank())
        experts = zbkern.nn.Experts(WIDTH, 2 * WIDTH, num_experts=EXPERTS // EXPERT_RANKS)
        self.experts = zbkern.nn.ExpertParallel(experts, router, top_k=2, group=mesh)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(torch.tanh(self.linear(x)))


def train(mesh: DeviceMesh, schedule: Schedule) -> list[float]:
    """The losses of this rank's tokens, on ranks of the last chunk."""
    torch.manual_seed(mesh["expert"].get_local_rank())
    inputs, targets = torch.randn(2, MICROBATCHES * TOKENS, WIDTH).unbind()
    chunks = [Layer(number, mesh["expert"]) for number in schedule.chunks_of(mesh["stage"].get_local_rank())]
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.5)
    losses = []
    with Pipeline(chunks, schedule, nn.functional.mse_loss, mesh.get_group("stage")) as pipe:
        pipe.queue.wgrads_per_collective = 1  # W runs there, too
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = pipe.step(inputs, targets)
            for chunk in chunks:  # as data parallelism does; experts add up over the group by themselves
                for name, parameter in chunk.named_parameters():
                    if "experts.experts" not in name:
                        dist.all_reduce(parameter.grad, group=mesh.get_group("expert"))
            optimizer.step()
            losses += [] if loss is None else [loss.item()]
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (STAGES, EXPERT_RANKS), mesh_dim_names=("stage", "expert"))
    beside = schedules.dualpipe_v(STAGES, MICROBATCHES)
    losses, in_turn = (train(mesh, schedule) for schedule in (beside, replace(beside, beside=())))
    if losses and mesh["expert"].get_local_rank() == 0:
        print("beside each other:", " ".join(f"{loss:.4f}" for loss in losses))
        print("in turn:          ", " ".join(f"{loss:.4f}" for loss in in_turn))
    assert all(abs(a - b) < 1e-5 for a, b in zip(losses, in_turn, strict=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
