"""The blocks of docs/integrations.md run, and give the gradients of plain torch."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbkern
from tests.support.programs import block, blocks
from tests.support.ranks import cpu_mesh, named_mesh
from zbkern import testing

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
WIDTH, MICROBATCHES = 6, 8


def make_chunks(count: int) -> tuple[list[nn.Module], nn.Sequential]:
    """Chunks, and a copy of them in one model."""
    torch.manual_seed(0)
    chunks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)]
    return list(chunks), nn.Sequential(*copy.deepcopy(chunks))


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(seed))
    return inputs, targets


def plain_gradients(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    for x, target in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        (nn.functional.mse_loss(model(x), target) / MICROBATCHES).backward()


def compare(mine: Sequence[int], chunks: Sequence[nn.Module], plain: nn.Sequential, data: Any) -> None:
    """Compares the gradients of this rank's chunks with a plain loop over the same data, then zeros them."""
    plain.zero_grad()
    plain_gradients(plain, *data)
    for index in mine:
        testing.assert_same_gradients(chunks[index], plain[index])
        chunks[index].zero_grad()


def torch_pipelining(csv_path: str) -> int:
    """Both blocks about torch's engine; returns how many kernels its W were."""
    rank = dist.get_rank()
    chunks, plain = make_chunks(4)
    inputs, targets = data(1)
    names: dict[str, Any] = {"rank": rank, "chunks": chunks, "inputs": inputs, "targets": targets, "csv_path": csv_path}
    exec(block(PAGE, "ScheduleZBVZeroBubble(stages"), names)
    compare((rank, 3 - rank), chunks, plain, (inputs, targets))
    exec(block(PAGE, "_load_csv"), names)
    kernels: list[int] = []
    for stage in names["stages"]:
        stage.queue.listeners.append(lambda tasks: kernels.append(len(tasks)))
    inputs, targets = data(2)
    names["planned"].step(*((inputs,) if rank == 0 else ()), **({"target": targets} if rank == 0 else {}))
    compare((rank, 3 - rank), chunks, plain, (inputs, targets))
    return len(kernels)


@pytest.mark.dist
def test_torch_pipelining(two_ranks: Any, tmp_path: Path) -> None:
    assert all(count > 0 for count in two_ranks.run(torch_pipelining, str(tmp_path / "plan.csv")))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * mask


def from_torchs_engine() -> list[Any]:
    """Asserts that the page's step is that of torch's own stages and schedule; how often gradients of one step are in
    those of two, of torch's engine and of zbkern's; whether torch evaluates in the mode of training."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

    torch.manual_seed(0)
    rank, chunks, (inputs, targets) = dist.get_rank(), [Masked() for _ in range(4)], data(1)
    mine, mask, loss_fn = (rank, rank + 2), torch.rand(len(inputs), 1), nn.functional.mse_loss

    def torchs(steps: int = 1, **options: Any) -> tuple[list[nn.Module], list[torch.Tensor], Any, Any]:
        modules = [copy.deepcopy(chunks[index]) for index in mine]
        stages = [
            PipelineStage(module, index, 4, torch.device("cpu")) for module, index in zip(modules, mine, strict=True)
        ]
        schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=MICROBATCHES, loss_fn=loss_fn, **options)
        losses, output = [], None
        for _ in range(steps):
            losses.clear()
            given = {"mask": mask} | ({"target": targets, "losses": losses} if rank else {})
            output = schedule.step(*(() if rank else (inputs,)), **given)
        return modules, losses, output, schedule

    expected, losses, output, _ = torchs()
    names = {"rank": rank, "chunks": copy.deepcopy(chunks), "inputs": inputs, "targets": targets, "mask": mask}
    exec(block(PAGE, "schedules.interleaved_zero_bubble"), names)
    for module, other in zip(names["modules"], expected, strict=True):
        testing.assert_same_gradients(module, other)
    if rank:
        torch.testing.assert_close(names["loss"], torch.stack(losses).mean())
        torch.testing.assert_close(names["outputs"], output)
    assert rank or names["loss"] is names["outputs"] is None

    once = names["modules"][0].up.weight.grad.clone()
    with zbkern.pipeline.Pipeline(names["modules"], names["schedule"], loss_fn) as pipe:
        pipe.step(inputs, targets, side={"mask": mask})
    twice, _, _, schedule = torchs(steps=2)
    ratios = [(each.up.weight.grad / once).mean().item() for each in (twice[0], names["modules"][0])]
    modes: list[bool] = []
    for module in twice:
        module.register_forward_hook(lambda module, *_: modes.append(module.training))
    schedule.eval(*(() if rank else (inputs,)), mask=mask, **({"target": targets} if rank else {}))
    unscaled, _, _, _ = torchs(scale_grads=False)
    torch.testing.assert_close(unscaled[0].up.weight.grad, once * MICROBATCHES)
    return [*ratios, all(modes)]


@pytest.mark.dist
def test_from_torchs_engine_to_ours(two_ranks: Any) -> None:
    for found in two_ranks.run(from_torchs_engine):
        assert found == [pytest.approx(1 + 1 / MICROBATCHES, rel=1e-3), pytest.approx(2, rel=1e-3), True]


def patched(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the modules of the table after the page's line: makes a stage, then changes the stage's module."""
    module = ModuleType("torchtitan.distributed.pipeline_parallel")
    module.PipelineStage = torch.distributed.pipelining.PipelineStage

    def split(chunk: nn.Module, index: int, count: int, group: Any, change: Callable[[nn.Module], nn.Module]) -> Any:
        stage = module.PipelineStage(chunk, index, count, torch.device("cpu"), group=group)
        stage.submod = change(chunk)
        return stage

    module.split = split
    package = ModuleType("torchtitan.distributed")
    package.pipeline_parallel = module
    monkeypatch.setitem(sys.modules, "torchtitan", ModuleType("torchtitan"))
    monkeypatch.setitem(sys.modules, "torchtitan.distributed", package)
    exec(block(PAGE, "pipeline_parallel.PipelineStage = PipelineStage"), {})
    return module


class Configurable:
    """Stands in for torchtitan's base class of modules, which has no arithmetic."""


class Linear(nn.Linear, Configurable):
    """As torchtitan's: torch's, built otherwise."""


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = Linear(WIDTH, 2 * WIDTH, bias=False), Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x)))) * mask.unsqueeze(-1)


class Decoder(nn.Module):
    """A chunk of two blocks, which takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): MaskedBlock() for index in range(2)})

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x, mask)
        return x


def saves_products(context: Any, operation: Any, *arguments: Any, **options: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)
    return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE


def changed(kind: str, module: nn.Module, mesh: Any) -> nn.Module:
    """What a framework does with a stage: selective activation checkpointing of every block, then its compilation in
    place; or FSDP2."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    if "sharded" in kind:
        return fully_shard(module, mesh=mesh["shard"], reshard_after_forward=kind == "sharded again")
    context = functools.partial(create_selective_checkpoint_contexts, saves_products)
    for name, layer in module.layers.items():
        module.layers[name] = checkpoint_wrapper(layer, context_fn=context)
        if kind == "compiled":
            module.layers[name].compile(backend="aot_eager", fullgraph=True)
    return module


def stages_by_the_page(kind: str) -> int:
    """Two steps of a V whose stages are made by the page's line and take a mask; how many W were deferred. Gradients of
    this rank's chunks are those of a plain loop."""
    from torch.distributed.pipelining import ScheduleZBVZeroBubble

    rank, mesh = dist.get_rank(), named_mesh(stage=2, shard=1)
    torch.manual_seed(0)
    chunks = [Decoder() for _ in range(4)]
    plain, ran = copy.deepcopy(chunks), []
    with pytest.MonkeyPatch.context() as patch:
        split = patched(patch).split
        change = functools.partial(changed, kind, mesh=mesh)
        stages = [split(chunks[index], index, 4, mesh.get_group("stage"), change) for index in (rank, 3 - rank)]
    for stage in stages:
        stage.queue.listeners.append(lambda tasks: ran.append(len(tasks)))
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    for step in range(2):
        inputs, targets = data(step)
        mask = torch.rand(len(inputs), generator=torch.Generator().manual_seed(step)) > 0.3
        schedule.step(*((inputs,) if rank == 0 else ()), mask=mask, **({"target": targets} if rank == 0 else {}))
        for x, target, own in zip(*(t.chunk(MICROBATCHES) for t in (inputs, targets, mask)), strict=True):
            for chunk in plain:
                x = chunk(x, own)
            (nn.functional.mse_loss(x, target) / MICROBATCHES).backward()
        for index in (rank, 3 - rank):
            found = list(chunks[index].parameters())  # checkpoint_wrapper gives them other names
            for ours, expected in zip(found, plain[index].parameters(), strict=True):
                testing.assert_close(getattr(ours.grad, "full_tensor", lambda ours=ours: ours.grad)(), expected.grad)
        for module in [*chunks, *plain]:
            module.zero_grad()
    return sum(ran)


@pytest.mark.dist
@pytest.mark.parametrize(
    "kind", ["sharded", "sharded again", "checkpointed", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_stages_that_a_framework_changes(two_ranks: Any, kind: str) -> None:
    # two steps, two chunks of two blocks: two linears, and the norm where nothing is compiled
    for deferred in two_ranks.run(stages_by_the_page, kind):
        assert deferred == 2 * 2 * 2 * MICROBATCHES * (2 if kind == "compiled" else 3)


def stage_of_a_part() -> list[bool]:
    """Which linears of a stage are zbkern's, of a module of which one had been converted."""
    from zbkern.pipeline.torch_pipelining import PipelineStage

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zbkern.convert(model, filter=lambda name, module: name == "1")
    PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    return [isinstance(layer, zbkern.nn.Linear) for layer in model]


@pytest.mark.dist
def test_a_stage_leaves_a_module_alone_that_is_converted_in_part(two_ranks: Any) -> None:
    assert two_ranks.run(stage_of_a_part) == [[False, True]] * 2


@pytest.mark.parametrize("hooked", [False, True])
def test_main_grad(hooked: bool) -> None:
    """The hook runs once for each parameter, after its W."""
    torch.manual_seed(0)
    microbatches = [tuple(torch.randn(2, 4, 8).bfloat16()) for _ in range(3)]
    model, ready = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).bfloat16(), []
    plain = copy.deepcopy(model).float()

    def hook(parameter: Any) -> None:
        """What Megatron's does for gradient reduction that overlaps with backward."""
        assert parameter.grad is not None
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        ready.append(parameter.main_grad.clone())

    for parameter in model.parameters() if hooked else ():
        exec(block(PAGE, "register_post_accumulate_grad_hook(hook)"), {"parameter": parameter, "hook": hook})
    names: dict[str, Any] = {"model": model, "microbatches": microbatches, "loss_fn": nn.functional.mse_loss}
    exec(block(PAGE, "main_grad = buffer"), names)
    for inputs, targets in microbatches:
        nn.functional.mse_loss(plain(inputs.float()), targets.float()).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    torch.testing.assert_close(names["buffer"], expected, rtol=2e-2, atol=2e-2)  # B is in bf16
    assert len(ready) == (len(names["parameters"]) if hooked else 0)
    for parameter in names["parameters"]:
        assert parameter.grad is None
        assert parameter.grad_added_to_main_grad
        assert parameter.main_grad.untyped_storage().data_ptr() == names["buffer"].untyped_storage().data_ptr()
        assert not hooked or any(torch.equal(parameter.main_grad, then) for then in ready)


def column_parallel(code: str) -> int:
    rank = dist.get_rank()
    names: dict[str, Any] = {"torch": torch, "zbkern": zbkern}
    exec(code, names)
    torch.manual_seed(0)
    x, weight, dy = torch.randn(2, 3, 4), torch.randn(6, 4), torch.randn(2, 3, 6)
    whole = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    nn.functional.linear(*whole).backward(dy)
    mine, share = x.clone().requires_grad_(), weight.chunk(2)[rank].clone().requires_grad_()
    queue = zbkern.WGradQueue()
    with queue.defer():
        names["column_parallel"](mine, share).backward(dy.chunk(2, -1)[rank])
    torch.testing.assert_close(mine.grad, whole[0].grad)
    assert share.grad is None
    queue.run()
    torch.testing.assert_close(share.grad, whole[1].grad.chunk(2)[rank])
    return len(queue)


@pytest.mark.dist
def test_tensor_parallel(two_ranks: Any) -> None:
    assert two_ranks.run(column_parallel, block(PAGE, "class ColumnParallel")) == [0, 0]


def sequence_parallel(code: str) -> float:
    """The largest difference of a gradient from that of one process, relative."""
    from bench.tensor_parallel import Block

    torch.manual_seed(0)
    model = Block(8).double()
    plain = copy.deepcopy(model)
    xs, dys = torch.randn(2, 3, 2, 4, 8, dtype=torch.float64)
    plain(xs.flatten(0, 1)).backward(dys.flatten(0, 1))
    part = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    mesh = cpu_mesh()
    inputs = [x[:, part].clone().requires_grad_() for x in xs]
    exec(code, {"model": model, "mesh": mesh, "inputs": inputs, "output_gradients": list(dys[:, :, part])})
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max()) for p, q in pairs)


def test_sequence_parallel(two_ranks: Any) -> None:
    code = block(PAGE, "regather_inputs=True")
    assert max(two_ranks.run(sequence_parallel, code)) < 1e-12


def expert_parallel(code: str) -> tuple[int, bool]:
    names: dict[str, Any] = {"dim": 6, "hidden_dim": 10, "tokens": torch.randn(2, 5, 6), "torch": torch}
    exec(code, names | {"zbkern": zbkern}, names)
    layer = names["layer"]
    return layer.experts.num_experts, all(p.grad is not None for p in layer.parameters())


def test_expert_parallel(two_ranks: Any) -> None:
    assert two_ranks.run(expert_parallel, block(PAGE, "zbkern.nn.ExpertParallel(")) == [(4, True)] * 2


def test_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install zbkern[test]")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 61, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2)).double()
    plain = copy.deepcopy(model)
    batches = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(61, (4, 2, 7))]
    code = block(PAGE, "model(**batch)").replace("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), 1.0)")
    exec(code, {"model": model, "batches": batches, "accumulate": 2})  # SGD: AdamW makes steps of rounding errors
    optimizer = torch.optim.SGD(plain.parameters(), 1.0)
    for index, batch in enumerate(batches):
        (plain(**batch).loss / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    assert not zbkern.unconverted(model)


def test_another_engine() -> None:
    plain = nn.Linear(4, 4)
    layer = zbkern.convert(copy.deepcopy(plain))
    queue = zbkern.WGradQueue()
    x = torch.randn(3, 4)
    names = {"torch": torch, "queue": queue, "chunk": 0, "microbatch": 1}
    exec(block(PAGE, "key=(chunk, microbatch)"), names | {"outputs": layer(x), "gradients": torch.ones(3, 4)})
    plain(x).sum().backward()
    testing.assert_same_gradients(layer, plain)
    assert queue.pending() == 0


def test_every_block_is_run() -> None:
    """A block that is added needs a test of its own, here or, for a framework's package, in tests/integrations."""
    files = [Path(__file__), *(Path(__file__).parents[1] / "integrations").glob("test_*.py")]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for code in blocks(PAGE):
        assert any(what in code for what in functools.reduce(set.union, map(_searched, source.splitlines()), set()))


def _searched(line: str) -> set[str]:
    _, found, rest = line.partition('block(PAGE, "')
    return {rest.partition('"')[0]} if found else set()
