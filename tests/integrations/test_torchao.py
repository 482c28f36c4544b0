"""torchao's own Float8Linear, with its 8-bit products emulated on a CPU: all W waits, gradients are torchao's."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.needs import installed
from tests.support.programs import block
from zbkern import testing

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
RECIPES = "tensorwise", "rowwise", "rowwise_with_gw_hp"
pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    return installed(tmp_path_factory, "torchao", "torchao==0.18.*")


def compare(recipe: str, bias: bool, dtype: torch.dtype) -> None:
    """Three microbatches of a model converted by us beside torchao's own."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from zbkern.integrations.torchao import convert

    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    plain = nn.Sequential(nn.Linear(32, 64, bias), nn.GELU(), nn.Linear(64, 32, bias)).to(dtype)
    plain = convert_to_float8_training(plain, config=config)
    model, x = convert(copy.deepcopy(plain)), torch.randn(3, 16, 32, dtype=dtype)
    assert zbkern.coverage(model, lambda: model(x[0]).square().mean()).share == 1
    queue = zbkern.WGradQueue()
    for index, rows in enumerate(x):
        mine, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
        expected = plain(theirs)
        expected.square().mean().backward()
        with queue.defer(index):
            y = model(mine)
            y.square().mean().backward()
        assert torch.equal(y, expected)
        assert torch.equal(mine.grad, theirs.grad)
    assert all(module.weight.grad is None for module in (model[0], model[2]))
    queue.run()
    testing.assert_same_gradients(model, plain)
    assert copy.deepcopy(model)[0](x[0]).equal(model[0](x[0]))
    names = {"model": nn.Sequential(nn.Linear(32, 64, dtype=dtype)), "config": config, "x": x[0], "queue": queue}
    exec(block(PAGE, "convert_to_float8_training("), names)
    assert names["model"][0].weight.grad.any()


def w_in_high_precision() -> None:
    """A main_grad in fp32 has the sum that a plain linear's has, of all microbatches in one W."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from zbkern.integrations.torchao import convert

    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    object.__setattr__(config, "emulate", True)
    plain = nn.Sequential(nn.Linear(64, 96, False)).bfloat16()
    model, queue = convert(convert_to_float8_training(plain, config=config)), zbkern.WGradQueue()
    weight, parts = model[0].weight, torch.randn(8, 128, 160).bfloat16().split([64, 96], dim=-1)
    weight.main_grad = torch.zeros(96, 64)
    for x, dy in zip(*parts, strict=True):
        with queue.defer():
            model(x.clone().requires_grad_()).backward(dy)
    runs: list[int] = []
    queue.listeners.append(lambda tasks: runs.append(len(tasks)))
    queue.run()
    assert runs == [8]
    x, dy = (part.double().flatten(0, 1) for part in parts)
    testing.assert_close(weight.main_grad, dy.t() @ x, tolerance=1e-6)


def step(folder: str) -> None:
    warnings.simplefilter("ignore")
    sys.path.append(folder)
    for recipe, bias, dtype in itertools.product(RECIPES, (False, True), (torch.bfloat16, torch.float32)):
        compare(recipe, bias, dtype)
    w_in_high_precision()


def test_all_w_waits(fresh_ranks: Any, package: str) -> None:
    fresh_ranks.run(step, package)
