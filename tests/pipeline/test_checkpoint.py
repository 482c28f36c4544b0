"""Checkpoints by the names of the whole model: saved and loaded with any stages, bit for bit, never half of one."""

from __future__ import annotations

import copy
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointed import LAYERS, MICROBATCHES, WIDTH, batch, build, chunks, layers, make_optimizer, train
from torch import Tensor, nn

from zbkern.optim import AdamW
from zbkern.pipeline import Optimizer, Pipeline, checkpoint, schedules
from zbkern.pipeline.local_transport import LocalTransport


def state_by_name(modules: list[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, buffers, and for every parameter its state and hyperparameters."""
    found: dict[str, Any] = {}
    for module in modules:
        found.update({key: value.clone() for key, value in module.state_dict().items()})
        names = {id(parameter): key for key, parameter in module.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in (p for p in group["params"] if id(p) in names):
                name = names[id(parameter)]
                found.update({f"{name}/{entry}": value for entry, value in optimizer.state[parameter].items()})
                found[f"{name}/settings"] = (group["lr"], group["weight_decay"], group["betas"])
    return found


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]) if isinstance(value, Tensor) else value == theirs[key], key


# ---- one process


def plain_run(module: nn.Module, optimizer: Any, steps: range, scaler: Any = None) -> list[float]:
    losses = []
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(inputs.to(module[0][0].weight.dtype)).float(), targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_torch_optimizer_in_one_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(7)
    module = layers(0, LAYERS)
    optimizer = make_optimizer([module])
    plain_run(module, optimizer, range(3))
    path = checkpoint.save(tmp_path, 3, module, optimizer, {"position": [3, "file", torch.arange(2)]})
    assert path == tmp_path / "step-00000003" == checkpoint.latest(tmp_path)
    saved = copy.deepcopy(state_by_name([module], optimizer))
    expected = plain_run(module, optimizer, range(3, 6))
    again = layers(0, LAYERS)
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    other = make_optimizer([again])
    other.param_groups[0]["lr"] = 5.0
    step, extra = checkpoint.load(tmp_path, again, other)
    assert step == 3
    assert extra["position"][:2] == [3, "file"]
    assert torch.equal(extra["position"][2], torch.arange(2))
    assert_same(saved, state_by_name([again], other))
    assert plain_run(again, other, range(3, 6)) == expected  # dropout, too


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_and_loss_scale_go_on_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Sequential, Optimizer, Any]:
        module = layers(0, 2).to(dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) if dtype == torch.float16 else None
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        transport = LocalTransport.ring(1)[0]
        return module, Optimizer(optimizer, transport, max_norm=0.1, scaler=scaler, master_weights=True), scaler

    module, optimizer, scaler = make()
    plain_run(module, optimizer, range(3), scaler)
    checkpoint.save(tmp_path, 3, module, optimizer)
    expected = plain_run(module, optimizer, range(3, 7), scaler)
    module, optimizer, scaler = make()
    plain_run(module, optimizer, range(10, 11), scaler)
    assert checkpoint.load(tmp_path, module, optimizer).step == 3
    assert plain_run(module, optimizer, range(3, 7), scaler) == expected


def zbkern_adamw(module: nn.Module, masters: bool = True) -> AdamW:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.003}]
    return AdamW(groups, lr=0.01, master_weights=masters, max_norm=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_in_the_state_go_on_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    module = layers(0, 2).to(dtype)
    optimizer = zbkern_adamw(module)
    plain_run(module, optimizer, range(3))
    path = checkpoint.save(tmp_path, 3, module, optimizer)
    keys = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = [name for name, _ in module.named_parameters()] if dtype == torch.bfloat16 else []
    assert {key for key in keys if "master" in key} == {f"master.{name}" for name in names}
    saved = copy.deepcopy(state_by_name([module], optimizer))
    expected = plain_run(module, optimizer, range(3, 7))
    again = layers(0, 2).to(dtype)
    other = zbkern_adamw(again)
    plain_run(again, other, range(10, 11))
    assert checkpoint.load(tmp_path, again, other).step == 3
    assert_same(saved, state_by_name([again], other))
    assert plain_run(again, other, range(3, 7)) == expected


@pytest.mark.parametrize("inside", [False, True])
def test_masters_change_hands(tmp_path: Path, inside: bool) -> None:
    """Between an Optimizer that keeps them and an AdamW that does so itself."""

    def make(module: nn.Module, inside: bool) -> Optimizer:
        inner = AdamW(module.parameters(), lr=0.01, master_weights=inside)
        optimizer = Optimizer(inner, LocalTransport.ring(1)[0], master_weights=not inside)
        plain_run(module, optimizer, range(2))
        return optimizer

    def masters(module: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        kept = [optimizer.optimizer.state[p].get("master") for p in module.parameters()]
        return [m.clone() for m in kept if m is not None] or [m.clone() for _, m in optimizer.masters]

    module, other = layers(0, 2).bfloat16(), layers(0, 2).bfloat16()
    writer = make(module, inside)
    checkpoint.save(tmp_path, 2, module, writer)
    saved = masters(module, writer)
    expected = plain_run(module, writer, range(2, 5))
    reader = make(other, not inside)
    checkpoint.load(tmp_path, other, reader)
    found = masters(other, reader)
    assert len(found) == len(saved) == 8
    assert all(torch.equal(a, b) for a, b in zip(found, saved, strict=True))
    assert plain_run(other, reader, range(2, 5)) == expected


def test_masters_of_a_model_that_was_saved_without(tmp_path: Path) -> None:
    module = layers(0, 1).bfloat16()
    checkpoint.save(tmp_path, 1, module)
    other = layers(1, 2).bfloat16()
    other = nn.Sequential(OrderedDict(layer0=other[0]))
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer = Optimizer(sgd, LocalTransport.ring(1)[0], master_weights=True)
    checkpoint.load(tmp_path, other, optimizer)
    for (parameter, master), saved in zip(optimizer.masters, module.parameters(), strict=True):
        assert torch.equal(parameter, saved)
        assert torch.equal(master, saved.float())


def test_keys_are_the_names_of_the_whole_model(tmp_path: Path) -> None:
    module = layers(0, 2)
    optimizer = make_optimizer([module])
    plain_run(module, optimizer, range(1))
    path = checkpoint.save(tmp_path, 1, module, optimizer)
    keys = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    moments = {
        f"optimizer.{entry}.{name}"
        for name, _ in module.named_parameters()
        for entry in ("step", "exp_avg", "exp_avg_sq")
    }
    assert keys == {
        *(f"model.{key}" for key in module.state_dict()),
        *moments,
        "group.0.0",
        "group.0.1",
        "random.0",
        "common",
    }


def test_the_newest_stay(tmp_path: Path) -> None:
    module = layers(0, 1)
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, module, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
    assert checkpoint.load(tmp_path, module).step == 10
    assert checkpoint.load(tmp_path, module, step=3).step == 3
    with pytest.raises(ValueError, match="no checkpoint of step 2; there are 3, 10"):
        checkpoint.load(tmp_path, module, step=2)
    checkpoint.save(tmp_path, 3, module, keep=1)  # a run that went back to an older step
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert checkpoint.load(tmp_path / "nothing", module) is None
    assert checkpoint.latest(tmp_path / "nothing") is None


POINTS = {"write": (dcp, "save"), "rename": (os, "rename"), "delete": (shutil, "rmtree")}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("point", "call", "step_before", "step_after"),
    [
        ("write", 0, 1, 1),
        ("rename", 0, 1, 1),  # torch's, of the metadata
        ("rename", 1, 1, 2),  # of the new checkpoint
        ("rename", 2, 2, 2),  # of the old one
        ("delete", 0, 2, 2),
    ],
)
def test_an_interrupted_save_leaves_a_good_checkpoint(
    tmp_path: Path, point: str, call: int, step_before: int, step_after: int, after: bool
) -> None:
    module = layers(0, 1)
    checkpoint.save(tmp_path, 1, module)
    good = copy.deepcopy(module.state_dict())
    nn.init.ones_(module[0][0].weight)
    where, name = POINTS[point]
    real, calls = getattr(where, name), []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) - 1 != call:
            return real(*arguments, **options)
        if after:
            real(*arguments, **options)
        elif point == "delete":
            next(path for path in Path(arguments[0]).rglob("*") if path.is_file()).unlink()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, interrupted)
        with pytest.raises((KeyboardInterrupt, dcp.CheckpointException)):
            checkpoint.save(tmp_path, 2, module)
    found = layers(0, 1)
    step, _ = checkpoint.load(tmp_path, found)
    assert step == (step_after if after else step_before)
    assert_same(dict(found.state_dict()), dict(good if step == 1 else module.state_dict()))
    checkpoint.save(tmp_path, 3, module)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    module = layers(0, 1)
    with pytest.raises(ValueError, match=r"chunks 0 and 1 both have a tensor 'layer0.0.weight'.*pass rename="):
        checkpoint.save(tmp_path, 1, {0: module, 1: layers(0, 1)})
    with pytest.raises(ValueError, match=r"of shape \[3\], is in none of the modules"):
        checkpoint.save(tmp_path, 1, module, torch.optim.SGD([nn.Parameter(torch.ones(3))]))
    with pytest.raises(
        TypeError, match=r"modules must be a Pipeline, \{chunk number: module\}, or one module; got list"
    ):
        checkpoint.save(tmp_path, 1, [module])
    with pytest.raises(ValueError, match="step must be a number of steps, at least 0; got -1"):
        checkpoint.save(tmp_path, -1, module)
    with pytest.raises(ValueError, match="keep must be at least 1; got 0"):
        checkpoint.save(tmp_path, 1, module, keep=0)
    assert not list(tmp_path.iterdir())
    checkpoint.save(tmp_path, 1, module)
    with pytest.raises(ValueError, match=r"'layer1.0.weight' is not in it; saved were 'layer0.0.weight'.* and 2 more"):
        checkpoint.load(tmp_path, layers(1, 2))
    wider = nn.Sequential(OrderedDict(layer0=nn.Sequential(nn.Linear(WIDTH, 9))))
    with pytest.raises(ValueError, match=r"'layer0.0.weight' is \[9, 6\] here and \[6, 6\] in it"):
        checkpoint.load(tmp_path, wider)


def test_rename_gives_chunks_that_count_from_zero_their_names(tmp_path: Path) -> None:
    def name(chunk: int, key: str) -> str:
        number, _, rest = key.partition(".")
        return f"layer{2 * chunk + int(number)}.{rest}"

    parts = {chunk: nn.Sequential(*layers(2 * chunk, 2 * chunk + 2)) for chunk in range(2)}
    checkpoint.save(tmp_path, 1, parts, rename=name)
    whole = nn.Sequential(OrderedDict((f"layer{i}", layers(0, 1)[0]) for i in range(LAYERS)))
    checkpoint.load(tmp_path, whole)
    assert_same(dict(whole.state_dict()), dict(layers(0, LAYERS).state_dict()))


def test_a_weight_under_two_names_loads_where_it_is_two(tmp_path: Path) -> None:
    def make(tied: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        if tied:
            module[1].weight = module[0].weight
        return module, torch.optim.AdamW(module.parameters(), lr=0.1)

    module, optimizer = make(tied=True)
    module(torch.ones(2, WIDTH)).square().sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, 1, module, optimizer)
    for tied in (False, True):
        again, other = make(tied)
        checkpoint.load(tmp_path, again, other)
        for weight in (again[0].weight, again[1].weight):
            assert torch.equal(weight, module[0].weight)
            assert torch.equal(other.state[weight]["exp_avg"], optimizer.state[module[0].weight]["exp_avg"])


# ---- two processes


def save_on_two(folder: Path, name: str) -> dict[str, Any]:
    modules, pipe, optimizer = build(name)
    with pipe:
        train(pipe, optimizer, range(3))
        checkpoint.save(folder, 3, pipe, optimizer, {"position": 3})
        return state_by_name(list(modules.values()), optimizer.optimizer)


def load_on_two(folder: Path, name: str) -> tuple[Any, dict[str, Any]]:
    modules, pipe, optimizer = build(name)
    with pipe:
        train(pipe, optimizer, range(20, 21))
        loaded = checkpoint.load(folder, pipe, optimizer)
        return loaded, state_by_name(list(modules.values()), optimizer.optimizer)


@pytest.mark.dist
@pytest.mark.parametrize(("writer", "reader"), [("zb_h1", "zb_v"), ("zb_v", "zb_h1")])
def test_loads_with_other_stages(two_ranks: Any, tmp_path: Path, writer: str, reader: str) -> None:
    saved = two_ranks.run(save_on_two, tmp_path, writer)
    expected = {**saved[0], **saved[1]}
    assert len(expected) > len(saved[0])
    results = two_ranks.run(load_on_two, tmp_path, reader)
    assert [loaded for loaded, _ in results] == [(3, {"position": 3})] * 2
    assert_same({**results[0][1], **results[1][1]}, expected)
    whole = layers(0, LAYERS)
    optimizer = make_optimizer([whole])
    assert checkpoint.load(tmp_path, whole, optimizer) == (3, {"position": 3})
    assert_same(state_by_name([whole], optimizer), expected)


def build_small(name: str) -> tuple[dict[int, nn.Sequential], Pipeline, Optimizer]:
    schedule = getattr(schedules, name)(2, MICROBATCHES)
    mine = {chunk: module.bfloat16() for chunk, module in chunks(schedule.placement, dist.get_rank()).items()}
    pipe = Pipeline(list(mine.values()), schedule, lambda y, target: (y.float() - target).square().mean(), timeout=30)
    parameters = [p for module in mine.values() for p in module.parameters()]
    return mine, pipe, Optimizer(AdamW(parameters, lr=0.01, master_weights=True), pipe, max_norm=0.15)


def small_on_two(folder: Path, name: str, save: bool) -> dict[str, Any]:
    modules, pipe, optimizer = build_small(name)
    with pipe:
        train(pipe, optimizer, range(3) if save else range(20, 21), torch.bfloat16)
        checkpoint.save(folder, 3, pipe, optimizer) if save else checkpoint.load(folder, pipe, optimizer)
        return state_by_name(list(modules.values()), optimizer.optimizer)


@pytest.mark.dist
def test_masters_in_the_state_load_with_other_stages(two_ranks: Any, tmp_path: Path) -> None:
    saved = two_ranks.run(small_on_two, tmp_path, "zb_h1", True)
    expected = {**saved[0], **saved[1]}
    assert expected["layer0.0.weight/master"].dtype == torch.float32
    assert torch.equal(expected["layer0.0.weight/master"].bfloat16(), expected["layer0.0.weight"])
    loaded = two_ranks.run(small_on_two, tmp_path, "zb_v", False)
    assert_same({**loaded[0], **loaded[1]}, expected)
    whole = layers(0, LAYERS).bfloat16()
    optimizer = AdamW(whole.parameters(), master_weights=True)
    checkpoint.load(tmp_path, whole, optimizer)
    assert_same(state_by_name([whole], optimizer), expected)


@pytest.mark.dist
def test_two_stages_load_what_one_process_saved(two_ranks: Any, tmp_path: Path) -> None:
    whole = layers(0, LAYERS)
    optimizer = make_optimizer([whole])
    plain_run(whole, optimizer, range(2))
    checkpoint.save(tmp_path, 2, whole, optimizer)
    results = two_ranks.run(load_on_two, tmp_path, "zb_h1")
    assert_same({**results[0][1], **results[1][1]}, state_by_name([whole], optimizer))


def sharded(folder: Path, ours: bool) -> tuple[dict[str, Any], bool]:
    """FSDP2 shards, saved by two ranks; then loaded into shards, and unsharded for the test."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def make(first: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Sequential(OrderedDict(layer0=nn.Linear(5, 3)))
        torch.manual_seed(first)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        return module, (AdamW if ours else torch.optim.AdamW)(module.parameters(), lr=0.1)

    module, optimizer = make(1)
    module(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    checkpoint.save(folder, 1, module, optimizer)
    again, other = make(2)
    checkpoint.load(folder, again, other)
    same = all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(module.parameters(), again.parameters(), strict=True)
    )
    return {key: value.full_tensor() for key, value in again.state_dict().items()}, same


@pytest.mark.dist
@pytest.mark.parametrize("ours", [False, True])
def test_shards(two_ranks: Any, tmp_path: Path, ours: bool) -> None:
    (first, same), (second, also_same) = two_ranks.run(sharded, tmp_path, ours)
    assert same
    assert also_same
    assert_same(first, second)
    if ours:
        assert_same(first, two_ranks.run(sharded, tmp_path / "torch", False)[0][0])
    whole = nn.Sequential(OrderedDict(layer0=nn.Linear(5, 3)))
    optimizer = torch.optim.AdamW(whole.parameters())
    checkpoint.load(tmp_path, whole, optimizer)
    assert_same(dict(whole.state_dict()), first)
    assert optimizer.state[whole[0].weight]["exp_avg"].shape == (3, 5)
