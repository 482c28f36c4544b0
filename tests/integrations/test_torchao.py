"""torchao's own Float8Linear, with its 8-bit products emulated on a CPU: all W waits, gradients are torchao's."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zbkern
from tests.support.launch_checks import KINDS, Random
from tests.support.needs import installed
from tests.support.programs import block
from zbkern import testing
from zbkern.kernels import dispatch

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


def casts(recipe: str, dtype: torch.dtype, values: str = "normal") -> None:
    """Every cast that a product makes, through the kernels' reference: torchao's own, and nothing is copied later."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

    from zbkern.integrations import torchao

    config = Float8LinearConfig.from_recipe_name(recipe)
    random = Random(dtype, "cpu", kind=values)
    x, weight, dy = random(24, 40), random(56, 40), random(24, 56)
    roles = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT
    for power_of_2 in (False, True):
        formats = dataclasses.replace(config, round_scales_to_power_of_2=power_of_2), LinearMMConfig()
        for tensor, cast, role, axis in (
            (x, config.cast_config_input, roles[0], -1),
            (weight.t(), config.cast_config_weight, roles[1], 0),
            (dy, config.cast_config_grad_output, roles[2], -1),
            (weight.t(), config.cast_config_weight_for_grad_input, roles[1], -1),
            (dy, config.cast_config_grad_output_for_grad_weight, roles[2], 0),
            (x, config.cast_config_input_for_grad_weight, roles[0], 0),
        ):
            theirs = torchao._cast(tensor, cast, role, axis, formats)
            with mock.patch.object(dispatch, "why_not", return_value=None), _reference_for_triton():
                ours = torchao._cast(tensor, cast, role, axis, formats)
            if ours is tensor:
                assert theirs is tensor
                continue
            assert ours._data.stride(axis) == 1
            for name in ("_orig_dtype", "_linear_mm_config", "_gemm_input_role", "_axiswise_dim", "shape", "dtype"):
                assert getattr(ours, name) == getattr(theirs, name), name
            torch.testing.assert_close(ours._scale, theirs._scale, rtol=0, atol=0, equal_nan=True)
            nan, others = (each._data.float().isnan() for each in (ours, theirs))
            assert torch.equal(nan, others)  # whose sign is a matter of which processor multiplied
            bits, others = (each._data.contiguous().view(torch.uint8)[~nan] for each in (ours, theirs))
            assert torch.equal(bits, others)


def _reference_for_triton() -> Any:
    real = dispatch.resolve
    return mock.patch.object(dispatch, "resolve", lambda op, impl, *more: real(op, "torch", *more))


def step(folder: str) -> None:
    warnings.simplefilter("ignore")
    sys.path.append(folder)
    for recipe, bias, dtype in itertools.product(RECIPES, (False, True), (torch.bfloat16, torch.float32)):
        compare(recipe, bias, dtype)
    w_in_high_precision()
    for recipe, dtype in itertools.product(RECIPES, (torch.bfloat16, torch.float16, torch.float32)):
        for values in KINDS:
            casts(recipe, dtype, values)
    with mock.patch.object(dispatch, "why_not", return_value=None), _reference_for_triton():
        for recipe in RECIPES:
            compare(recipe, True, torch.bfloat16)


def emulated(folder: str) -> None:
    """The casts as compiled for 9.0; the products are torchao's, emulated."""
    warnings.simplefilter("ignore")
    sys.path.append(folder)
    from tests.emulator import library
    from tests.emulator.gpu import gpu

    real = dispatch.why_not

    def why_not(op: str, *more: Any) -> str | None:
        return None if op == "float8" else real(op, *more)

    with gpu(90), mock.patch.object(dispatch, "why_not", why_not):
        for recipe, fewest in zip(RECIPES, (100, 50, 40), strict=True):
            compare(recipe, True, torch.bfloat16)
            assert len(library.launches()) > fewest
        assert not library.findings()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++")), reason="needs g++")
def test_fused_casts(fresh_ranks: Any, package: str) -> None:
    fresh_ranks.run(emulated, package)


def test_all_w_waits(fresh_ranks: Any, package: str) -> None:
    fresh_ranks.run(step, package)
