"""The module database of torch's own tests, converted: equal to torch in float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zbkern
from zbkern import testing


def own(tree: Any) -> Any:
    """The same values as leaves of a graph."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree)


def results(function: Callable[..., Any], arguments: Any, how: str) -> list[Tensor | None]:
    """Outputs, then the gradients of the arguments. how: "torch" or "immediate" without a queue, else where W waits."""
    arguments, keywords = own(arguments)
    queue, deferring = (None, contextlib.nullcontext()) if how in ("torch", "immediate") else deferral()
    torch.manual_seed(1)  # dropout
    with deferring if how == "forward, too" else contextlib.nullcontext():
        outputs = [t for t in pytree.tree_leaves(function(*arguments, **keywords)) if isinstance(t, Tensor)]
    sums = [(t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in outputs]
    roots = [total for total in sums if total.requires_grad]
    if roots:
        with deferring:
            torch.autograd.backward(roots)
    if queue is not None:
        queue.run()
    leaves = [t for t in pytree.tree_leaves((arguments, keywords)) if isinstance(t, Tensor)]
    return [*(t.detach() for t in outputs), *(t.grad for t in leaves)]


def deferral() -> tuple[zbkern.WGradQueue, Any]:
    queue = zbkern.WGradQueue()
    return queue, queue.defer()


def assert_equal(found: list[Tensor | None], expected: list[Tensor | None], name: str) -> None:
    assert len(found) == len(expected), name
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert torch.equal(ours.isnan(), theirs.isnan()), name
            testing.assert_close(ours.nan_to_num(), theirs.nan_to_num(), name, scale=1e-3)


MOST = 16  # samples of one module, spread over all that there are: a loss of torch's has 857
WAYS = ("immediate", "backward", "forward, too")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of nested tensors, which some transformers do without
def test_modules() -> None:
    """Every module of the database stays as it is or, where convert knows a part of it, computes the same."""
    pytest.importorskip("expecttest", reason="torch's own tests need expecttest: pip install zbkern[test]")
    from torch.testing._internal.common_modules import module_db

    converted: dict[str, int] = {}
    for info in module_db:
        for training in (True, False):
            torch.manual_seed(0)
            samples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
            )
            for sample in samples[:: 1 + len(samples) // MOST]:
                arguments = sample.constructor_input
                module = info.module_cls(*arguments.args, **arguments.kwargs)
                kinds = [type(part) for part in module.modules()]
                twin = zbkern.convert(copy.deepcopy(module))
                if not any(isinstance(part, zbkern.nn.Layer) for part in twin.modules()):
                    assert [type(part) for part in twin.modules()] == kinds, info.name
                    continue
                converted[info.name] = converted.get(info.name, 0) + 1
                check_module(module.double().train(training), sample, f"{info.name} {arguments}")
    assert min(converted.get(name, 0) for name in KNOWN) > 0, converted
    assert len(converted) >= 9


KNOWN = ("nn.Linear", "nn.Embedding", "nn.LayerNorm", "nn.RMSNorm", "nn.TransformerEncoderLayer", "nn.Transformer")


def check_module(module: nn.Module, sample: Any, name: str) -> None:
    arguments = sample.forward_input.args, sample.forward_input.kwargs
    expected = results(module, arguments, "torch")
    for how in WAYS:
        twin = zbkern.convert(copy.deepcopy(module))
        twin.zero_grad()
        assert_equal(results(twin, arguments, how), expected, f"{name}, {how}")
        testing.assert_same_gradients(twin, module)
