"""A decoder in stages of several ranks each, tensor-parallel ones or replicas, and the same model in one process."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zbkern
from tests.support.ranks import named_mesh
from zbkern.pipeline import Optimizer, Pipeline, Schedule, add_loss, schedules
from zbkern.pipeline.transport.mailbox import Note

WIDTH, HEADS, TOKENS, VOCABULARY, BLOCKS = 16, 4, 4, 12, 2
ROWS, MICROBATCHES, MAX_NORM = 16, 4, 4.0
KINDS = ("tensor", "sequence", "ddp", "ddp, views", "fsdp", "fsdp, gathered once")
REPLICAS = KINDS[2:]
EMBEDDING, HEAD = "0.weight", f"{BLOCKS + 1}.vocabulary.weight"

Layout = tuple[int, int, str]  # stages, ranks of each, schedule
Forced = tuple[tuple[int, float], ...]  # (step, the gradient that the head's gain gets in it)


class ForcedGain(torch.autograd.Function):
    """x * gain, with any gradient of the gain that a test wants: of a slice, its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, value: float | None) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.value = None if value is None else value * x.shape[1] / TOKENS
        return x * gain

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain = ctx.saved_tensors
        found = (dy * x).sum().reshape(1) if ctx.value is None else torch.full_like(gain, ctx.value)
        return dy * gain, found, None


class Block(nn.Module):
    """Attention and a gated MLP; the heads are those of this rank's part of q, k and v. penalised: adds a loss, too."""

    penalised = False

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (p(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if carry is not None:
            k, v = (carry.append((id(self), name), each, 2) for name, each in (("k", k), ("v", v)))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        y = nn.functional.scaled_dot_product_attention(q, k, v, seen)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        y = x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return add_loss(y, y.square().mean()) if self.penalised else y


class Head(nn.Module):
    """force: see `Forced`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.vocabulary = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.force: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        return ForcedGain.apply(self.vocabulary(self.norm(x)), self.gain, self.force)  # type: ignore[no-any-return]


class Layers(nn.Sequential):
    """Some layers of the model, which declare the tied weight as chunks of `cut` do, also once it is a DTensor."""

    tied = False

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        for layer in self:
            x = layer(x, carry) if carry is not None and isinstance(layer, Block) else layer(x)
        return x

    @property
    def tied_parameters(self) -> dict[str, Tensor]:
        named = dict(self.named_parameters(remove_duplicate=False))
        found = [named[name] for name in (EMBEDDING, HEAD) if name in named]
        return {"embedding": found[0]} if found and self.tied else {}


def layers(numbers: range) -> Layers:
    """Layers of the model by their numbers in it; each draws its weights from its own number."""
    found: OrderedDict[str, nn.Module] = OrderedDict()
    for number in numbers:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            kinds = {0: lambda: nn.Embedding(VOCABULARY, WIDTH), BLOCKS + 1: Head}
            found[str(number)] = kinds.get(number, Block)().double()
    return Layers(found)


def chunk(index: int, count: int) -> Layers:
    share = (BLOCKS + 2) // count
    return layers(range(index * share, (index + 1) * share))


def tie(chunks: dict[int, Layers], count: int) -> None:
    """One parameter where `chunks` holds embedding and head, else equal ones, which both declare."""
    if count - 1 in chunks and 0 not in chunks:
        chunks[count - 1][-1].vocabulary.load_state_dict(layers(range(1))[0].state_dict())
    elif count - 1 in chunks:
        chunks[count - 1][-1].vocabulary.weight = chunks[0][0].weight
    for module in chunks.values():
        module.tied = True


def penalise(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, Block):
            part.penalised = True


def parallelize(module: Layers, mesh: DeviceMesh, sequence: bool) -> None:
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


def replicate(kind: str, module: Layers, mesh: DeviceMesh) -> nn.Module:
    if kind.startswith("ddp"):
        if not any(p.requires_grad for p in module.parameters()):
            return module  # DistributedDataParallel refuses it
        options = {"gradient_as_bucket_view": True} if kind == "ddp, views" else {"bucket_cap_mb": 0.0003}
        return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group(), **options)
    from torch.distributed.fsdp import fully_shard

    holds_a_tie = len(module) == BLOCKS + 2 and module.tied  # which has to be in one group of parameters
    for part in (*(() if holds_a_tie else module), module):
        fully_shard(part, mesh=mesh, reshard_after_forward=kind == "fsdp")
    return module


def batch(step: int) -> tuple[Tensor, Tensor]:
    """That of all ranks."""
    indices = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return indices[:, :-1].contiguous(), indices[:, 1:].contiguous()


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(modules: Any) -> torch.optim.Optimizer:
    parameters = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2]},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)  # eps: AdamW makes steps of rounding errors without


def make_pairs(modules: Any) -> list[tuple[torch.optim.Optimizer, float]]:
    """Two optimizers with norms of their own."""
    parameters = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
    matrices, rest = ([p for p in parameters if (p.dim() > 1) is which] or [{"params": []}] for which in (True, False))
    first, second = torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2, eps=1e-4)
    return [(first, MAX_NORM / 4), (second, MAX_NORM)]


def freeze(named: dict[str, Tensor], names: tuple[str, ...]) -> None:
    for name, parameter in named.items():
        parameter.requires_grad_(not name.startswith(names))


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


class Stages(Trained):
    """This rank's chunks under a Pipeline and its Optimizer. saving: makes the schedule that runs of a published one;
    frozen: how names of parameters that take no gradient begin; how: of the Optimizer; more: of the Pipeline."""

    def __init__(
        self,
        kind: str,
        layout: Layout,
        tied: bool = False,
        forced: Forced = (),
        *,
        saving: Callable[[Schedule], Schedule] = lambda schedule: schedule,
        slices: Any = 1,
        frozen: tuple[str, ...] = (),
        penalised: bool = False,
        pairs: bool = False,
        late: bool = False,
        dtype: torch.dtype = torch.float64,
        how: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        stages, ranks, name = layout
        mesh = named_mesh(stage=stages, other=ranks)
        self.schedule = saving(getattr(schedules, name)(stages, MICROBATCHES, slices=slices))
        count, stage = len(self.schedule.placement), mesh["stage"].get_local_rank()
        self.mine = {index: chunk(index, count).to(dtype) for index in self.schedule.chunks_of(stage)}
        self.forced, self.data = dict(forced), (0, 1)
        if tied:
            tie(self.mine, count)
        freeze(self.named(), frozen)
        self.modules: list[nn.Module] = []
        for module in map(zbkern.convert, self.mine.values()):
            if penalised:
                penalise(module)
            if kind in REPLICAS:
                self.data = mesh["other"].get_local_rank(), ranks
                self.modules.append(replicate(kind, module, mesh["other"]))
            else:
                if ranks > 1:
                    parallelize(module, mesh["other"], kind == "sequence")
                self.modules.append(module)
        if tied and kind not in REPLICAS and {0, count - 1} <= {*self.mine}:
            self.mine[count - 1][-1].vocabulary.weight = self.mine[0][0].weight  # a DTensor by now
        freeze(self.named(), frozen)
        self.group = mesh.get_group("stage")
        self.pipe = Pipeline(self.modules, self.schedule, loss_fn, self.group, **{"timeout": 60, **more})
        if late and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            delay_norms(self.pipe._calls.transport)
        make: Any = make_pairs if pairs else make_optimizer
        how = {"max_norm": None if pairs else MAX_NORM, "master_weights": dtype.itemsize < 4, **(how or {})}
        self.optimizer = Optimizer(make(self.mine.values()), self.pipe, **how)
        self.first, self.last = 0 in self.mine, count - 1 in self.mine

    def batch(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """What this rank needs of it."""
        inputs, targets = (part.chunk(self.data[1])[self.data[0]] for part in batch(step))
        return inputs if self.first else None, targets if self.last else None

    def gradients(self, step: int) -> float | None:
        """Forward and backward of a step; its loss on ranks of the last stage, over all replicas."""
        self.optimizer.zero_grad()
        if self.last:
            value = self.forced.get(step)
            [*self.mine.values()][-1][-1].force = None if value is None else value / self.schedule.microbatches
        loss = self.pipe.step(*self.batch(step))
        return None if loss is None else loss.item()

    def named(self) -> dict[str, Tensor]:
        """This rank's parameters by their names in the model."""
        return {name: p for module in self.mine.values() for name, p in module.named_parameters(remove_duplicate=False)}


def delay_norms(transport: Any) -> None:
    """One of the ranks of a stage hears later than the others whether it must clip, and has begun more forwards."""
    send = transport.send

    def send_late(rank: int, tag: Any, tensors: Any) -> None:
        if isinstance(tag, Note):
            time.sleep(0.1)
        send(rank, tag, tensors)

    transport.send = send_late


class OneProcess:
    """The same model in one process, with torch's layers and optimizers."""

    max_norm = MAX_NORM

    def __init__(
        self,
        tied: bool = False,
        forced: Forced = (),
        frozen: tuple[str, ...] = (),
        pairs: bool = False,
        penalised: bool = False,
    ) -> None:
        self.model: nn.Module = chunk(0, 1)
        if penalised:
            penalise(self.model)
        self.forced = dict(forced)
        if tied:
            tie({0: self.model}, 1)
        freeze(self.named(), frozen)
        self.pairs: Any = make_pairs([self.model]) if pairs else [(make_optimizer([self.model]), self.max_norm)]

    def named(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters(remove_duplicate=False))

    def gradients(self, step: int) -> float:
        self.model.zero_grad()
        self.model[-1].force = self.forced.get(step)
        loss = loss_fn(self.model(batch(step)[0]), batch(step)[1])
        loss.backward()
        return loss.item()

    def train(self, steps: range) -> tuple[list[float], list[float]]:
        """Losses and norms; torch's clip_grads_with_norm_ with the factor in fp32, as for parameters in fp32."""
        losses, found = [], []
        for step in steps:
            losses.append(self.gradients(step))
            groups = [([p for g in o.param_groups for p in g["params"]], limit) for o, limit in self.pairs]
            norms = [nn.utils.get_total_norm([p.grad for p in parameters]) for parameters, _ in groups]
            found.append(math.hypot(*(norm.item() for norm in norms)))
            if math.isfinite(found[-1]):
                for (parameters, limit), norm in zip(groups, norms, strict=True):
                    nn.utils.clip_grads_with_norm_(parameters, limit, norm.float())
                for optimizer, _ in self.pairs:
                    optimizer.step()
        return losses, found


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values(named: dict[str, Tensor]) -> dict[str, Any]:
    """The whole tensors, for another process; collective."""
    return {name: whole(tensor).detach().double().numpy() for name, tensor in named.items()}


def apart(ours: dict[str, Any], theirs: dict[str, Tensor]) -> dict[str, float]:
    """How far each of these values is from the one of that name."""
    return {name: (torch.from_numpy(value) - theirs[name]).abs().max().item() for name, value in ours.items()}
