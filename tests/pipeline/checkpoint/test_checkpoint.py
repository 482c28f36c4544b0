"""Checkpoints by the names of the whole model: saved and loaded with any stages, bit for bit, never half of one."""

from __future__ import annotations

import copy
import io
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support.checkpointed import (
    LAYERS,
    WIDTH,
    assert_same,
    layers,
    make_optimizer,
    plain_run,
)
from zbkern.pipeline import Pipeline, checkpoint, schedules

# ---- one process


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


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    module = layers(0, 1)
    with pytest.raises(ValueError, match=r"chunks 0 and 1 both have a tensor 'layer0.0.weight'.*pass rename="):
        checkpoint.save(tmp_path, 1, {0: module, 1: layers(0, 1)})
    with pytest.raises(ValueError, match=r"of shape \[3\], is in none of the modules"):
        checkpoint.save(tmp_path, 1, module, torch.optim.SGD([nn.Parameter(torch.ones(3))]))
    with pytest.raises(AttributeError, match="'list' object has no attribute 'items'"):
        checkpoint.save(tmp_path, 1, [module])
    assert not list(tmp_path.iterdir())
    checkpoint.save(tmp_path, 1, module)
    with pytest.raises(ValueError, match=r"'layer1.0.weight' is not in it; saved were 'layer0.0.weight'.* and 2 more"):
        checkpoint.load(tmp_path, layers(1, 2))
    wider = nn.Sequential(OrderedDict(layer0=nn.Sequential(nn.Linear(WIDTH, 9))))
    with pytest.raises(ValueError, match=r"'layer0.0.weight' is \[9, 6\] here and \[6, 6\] in it"):
        checkpoint.load(tmp_path, wider)


def test_what_could_not_be_read_again_is_refused_and_replaces_nothing(tmp_path: Path) -> None:
    module = layers(0, 1)
    checkpoint.save(tmp_path, 1, module)
    with pytest.raises(TypeError, match=r"extra\['data'\]\[1\] must be a number, a string, a tensor.*got PosixPath"):
        checkpoint.save(tmp_path, 2, module, extra={"data": [3, tmp_path]})
    with pytest.raises(TypeError, match=r"extra\['function'\] must be .*got function"):
        checkpoint.save(tmp_path, 2, module, extra={"function": lambda: 0})
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    optimizer.param_groups[0]["origin"] = tmp_path
    with pytest.raises(TypeError, match=r"param_groups\['values'\]\['origin'\] must be .*got PosixPath"):
        checkpoint.save(tmp_path, 2, module, optimizer)
    assert checkpoint.load(tmp_path, layers(0, 1)) == (1, None)


def test_numbers_of_numpy_load_as_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    module = layers(0, 1)
    optimizer = make_optimizer([module])
    optimizer.param_groups[0]["lr"] = 0.5 * (1 + numpy.cos(0.3))
    checkpoint.save(tmp_path, 1, module, optimizer, {"tokens": [numpy.int64(7)], "best": numpy.float32(0.5)})
    again = layers(0, 1)
    other = make_optimizer([again])
    found = checkpoint.load(tmp_path, again, other)
    assert found == (1, {"tokens": [7], "best": 0.5})
    assert type(found.extra["tokens"][0]) is int
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_model_that_is_a_part_of_what_was_saved_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save(tmp_path, 1, layers(0, 2))
    checkpoint.load(tmp_path, layers(0, 2))
    assert "no rank's model" not in caplog.text
    checkpoint.load(tmp_path, layers(0, 1))
    assert "holds 7 tensors that no rank's model has: 'layer1.0.weight', 'layer1.0.bias'" in caplog.text


def test_a_buffer_of_bytes_that_does_not_fit_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    def make(count: int) -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("mask", torch.ones(count, dtype=torch.uint8))
        return module

    checkpoint.save(tmp_path, 1, make(3))
    module = make(4)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=r"'mask' is \[4\] here and \[3\] in it"):
        checkpoint.load(tmp_path, module)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


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


class Tied(nn.Module):
    def __init__(self, values: tuple[float, float] | None = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if values is None:
            self.head.weight = self.embedding.weight
        else:
            nn.init.constant_(self.embedding.weight, values[0])
            nn.init.constant_(self.head.weight, values[1])


@pytest.mark.parametrize("head", [3.0, 1.0])
def test_two_tensors_for_one_parameter_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, head: float) -> None:
    untied, tied = Tied((1.0, head)), Tied()
    optimizers = [torch.optim.AdamW(module.parameters()) for module in (untied, tied)]
    (untied.embedding.weight * 2 + untied.head.weight * head).sum().backward()
    optimizers[0].step()
    checkpoint.save(tmp_path, 1, untied, optimizers[0])
    checkpoint.load(tmp_path, tied, optimizers[1])
    assert torch.equal(tied.head.weight, untied.embedding.weight)
    first = optimizers[0].state[untied.embedding.weight]["exp_avg"]
    assert torch.equal(optimizers[1].state[tied.head.weight]["exp_avg"], first), "moments of the other tensor"
    told = "'head.weight' differs from 'embedding.weight'" in caplog.text
    assert told == (head == 3.0), caplog.text


# ---- two processes


def tied_on_two(folder: Path, head: float) -> tuple[float, str]:
    """The embedding on rank 0, the head on rank 1, tied; the whole model was saved without that."""
    rank, records = dist.get_rank(), io.StringIO()
    whole = Tied((1.0, head))
    chunk = nn.Sequential(OrderedDict([("embedding", whole.embedding)] if rank == 0 else [("head", whole.head)]))
    weight = next(chunk.parameters())
    nn.init.zeros_(weight)
    handler = logging.StreamHandler(records)
    logging.getLogger("zbkern").addHandler(handler)
    try:
        with Pipeline(chunk, schedules.zb_h1(2, 2), nn.functional.mse_loss, tied={"weight": weight}) as pipe:
            checkpoint.load(folder, pipe)
    finally:
        logging.getLogger("zbkern").removeHandler(handler)
    return weight[0, 0].item(), records.getvalue()


@pytest.mark.dist
def test_copies_on_two_ranks_that_differ_are_told(two_ranks: Any, tmp_path: Path) -> None:
    for step, head in enumerate((1.0, 3.0)):
        checkpoint.save(tmp_path, step, Tied((1.0, head)))
        (_, records), (value, _) = two_ranks.run(tied_on_two, tmp_path, head)
        assert value == head
        assert ("'head.weight' differs from 'embedding.weight'" in records) == (head == 3.0), records
