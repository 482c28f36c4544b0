"""A decoder in stages of tensor-parallel ranks for tests, and the same model in one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zbkern
from tests.support.meshes import named_mesh
from zbkern.pipeline import Optimizer, Pipeline, Schedule, schedules

WIDTH, HEADS, TOKENS, VOCABULARY, BLOCKS = 16, 4, 4, 12, 2
MICROBATCHES, MAX_NORM = 4, 4.0
STEEP = (3, 4, 11, 17)  # steps whose gradients are clipped


class Block(nn.Module):
    """Attention and a gated MLP; the heads are those of this rank's part of q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (p(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.vocabulary = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.vocabulary(self.norm(x))


def layers(numbers: range) -> nn.Sequential:
    """Layers of the model by their numbers in it; each draws its weights from its own number."""
    found: OrderedDict[str, nn.Module] = OrderedDict()
    for number in numbers:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            kinds = {0: lambda: nn.Embedding(VOCABULARY, WIDTH), BLOCKS + 1: Head}
            found[str(number)] = kinds.get(number, Block)().double()
    return nn.Sequential(found)


def chunk(index: int, count: int) -> nn.Sequential:
    share = (BLOCKS + 2) // count
    return layers(range(index * share, (index + 1) * share))


def parallelize(module: nn.Sequential, mesh: DeviceMesh, sequence: bool) -> None:
    """Tensor parallelism of torch's own API; sequence: what lies between is cut by tokens, as between stages."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    tokens = Shard(1) if sequence else Replicate()
    inner = {name: ColwiseParallel(input_layouts=tokens) for name in ("q", "k", "v", "gate", "up")}
    inner |= {name: RowwiseParallel(output_layouts=tokens) for name in ("out", "down")}
    plan: dict[str, Any] = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        f"{BLOCKS + 1}.vocabulary": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
        **{f"{index}.{name}": style for index in range(1, BLOCKS + 1) for name, style in inner.items()},
    }
    if sequence:
        norms = [f"{i}.{name}" for i in range(1, BLOCKS + 1) for name in ("attention_norm", "mlp_norm")]
        plan |= dict.fromkeys([*norms, f"{BLOCKS + 1}.norm"], SequenceParallel())
    names = {name for name, _ in module.named_modules()}
    parallelize_module(module, mesh, {name: style for name, style in plan.items() if name in names})


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    indices = torch.randint(VOCABULARY, (2 * MICROBATCHES, TOKENS + 1), generator=generator)
    steepness = torch.full((len(indices), 1), 100 if step in STEEP else 0)
    return indices[:, :-1].contiguous(), torch.cat([indices[:, 1:], steepness], 1)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    factor = 0.5 + targets[0, -1]
    return factor * nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, :-1].flatten())


def make_optimizer(modules: list[nn.Module]) -> torch.optim.Optimizer:
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2]},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)  # eps: AdamW makes steps of rounding errors without


class Trained:
    """Steps of whatever has the gradients of a step and an optimizer."""

    optimizer: Optimizer

    def gradients(self, step: int) -> float | None:
        raise NotImplementedError

    def train(self, steps: range) -> tuple[list[float | None], list[float]]:
        """Losses (on ranks of the last stage) and norms of all steps."""
        losses, norms = [], []
        for step in steps:
            losses.append(self.gradients(step))
            norms += [self.optimizer.last_norm] if step > steps.start else []
            self.optimizer.step()
        self.optimizer.validate()
        return losses, [*norms, self.optimizer.last_norm]


class TrainedStages(Trained):
    """This rank's chunks, by number, under a Pipeline and its Optimizer."""

    mine: dict[int, nn.Sequential]
    pipe: Pipeline
    first: bool
    last: bool

    def gradients(self, step: int) -> float | None:
        """Forward and backward of a step; its loss on ranks of the last stage."""
        inputs, targets = batch(step)
        self.optimizer.zero_grad()
        loss = self.pipe.step(inputs if self.first else None, targets if self.last else None)
        return None if loss is None else loss.item()

    def named(self) -> dict[str, Tensor]:
        """This rank's parameters by their names in the model."""
        return {name: p for module in self.mine.values() for name, p in module.named_parameters(remove_duplicate=False)}


class Stages(TrainedStages):
    """This rank's chunks under a Pipeline and its Optimizer: `stages` x `tensor` ranks."""

    def __init__(
        self,
        stages: int,
        tensor: int,
        schedule: str,
        tied: bool,
        sequence: bool,
        fill: str,
        saving: Callable[[Schedule], Schedule] = lambda schedule: schedule,
        **more: Any,
    ) -> None:
        mesh = named_mesh(stage=stages, tensor=tensor)
        self.schedule = saving(getattr(schedules, schedule)(stages, MICROBATCHES))
        count = len(self.schedule.placement)
        self.mine = {index: chunk(index, count) for index in self.schedule.chunks_of(mesh["stage"].get_local_rank())}
        if tied and count - 1 in self.mine:
            self.mine[count - 1][-1].vocabulary.load_state_dict(layers(range(1))[0].state_dict())
        for module in self.mine.values():
            zbkern.convert(module)
            if tensor > 1:
                parallelize(module, mesh["tensor"], sequence)
        self.tied = tie(self.mine, count) if tied else {}
        self.group = mesh.get_group("stage")
        self.modules = list(self.mine.values())
        more = {"fill": fill, "tied": self.tied, "timeout": 60, **more}
        self.pipe = Pipeline(self.modules, self.schedule, loss_fn, self.group, **more)
        self.optimizer = Optimizer(make_optimizer(self.modules), self.pipe, max_norm=MAX_NORM)
        self.first, self.last = 0 in self.mine, count - 1 in self.mine


def tie(chunks: dict[int, nn.Sequential], count: int) -> dict[str, Tensor]:
    """One parameter where `chunks` holds embedding and head, else what Pipeline(tied=) takes."""
    if 0 in chunks and count - 1 in chunks:
        chunks[count - 1][-1].vocabulary.weight = chunks[0][0].weight
    found = [chunks[0][0].weight] if 0 in chunks else []
    found += [chunks[count - 1][-1].vocabulary.weight] if count - 1 in chunks else []
    return {"embedding": found[0]} if found else {}


class OneProcess:
    """The same model in one process, with torch's layers."""

    max_norm: float | None = None

    def __init__(self, tied: bool) -> None:
        self.model = chunk(0, 1)
        if tied:
            tie({0: self.model}, 1)
        self.optimizer = make_optimizer([self.model])

    def named(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters(remove_duplicate=False))

    def gradients(self, step: int) -> float:
        self.optimizer.zero_grad()
        loss = loss_fn(self.model(batch(step)[0]), batch(step)[1])
        loss.backward()
        return loss.item()

    def clip(self) -> float:
        """torch's clip_grad_norm_ with the factor in fp32, as for parameters in fp32, and the norm in fp64."""
        parameters = list(self.model.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        nn.utils.clip_grads_with_norm_(parameters, self.max_norm or MAX_NORM, norm.float())
        return norm.item()

    def train(self, steps: range) -> tuple[list[float], list[float]]:
        losses, norms = [], []
        for step in steps:
            losses.append(self.gradients(step))
            norms.append(self.clip())
            self.optimizer.step()
        return losses, norms


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values(named: dict[str, Tensor]) -> dict[str, Any]:
    """The whole tensors, for another process; collective."""
    return {name: whole(tensor).detach().numpy() for name, tensor in named.items()}


def apart(ours: dict[str, Any], theirs: dict[str, Tensor]) -> dict[str, float]:
    """How far each of these values is from the one of that name."""
    return {name: (torch.from_numpy(value) - theirs[name]).abs().max().item() for name, value in ours.items()}
