"""The module and op databases of torch's own tests, through our layers and functions: equal to torch in float64."""

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
from zbkern import functional as Z
from zbkern import testing


@pytest.fixture(scope="module")
def databases() -> tuple[list[Any], dict[str, Any]]:
    pytest.importorskip("expecttest", reason="torch's own tests need expecttest: pip install zbkern[test]")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return module_db, {op.name: op for op in op_db}


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
def test_modules(databases: Any) -> None:
    """Every module of the database stays as it is or, where convert knows a part of it, computes the same."""
    converted: dict[str, int] = {}
    for info in databases[0]:
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return Z.linear if weight.dim() == 2 else None


def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return (lambda x, shape, *rest, **named: Z.rms_norm(x, *rest, **named)) if len(shape) == 1 else None


def layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    if len(shape) != 1 or (weight is None and bias is not None):
        return None
    return lambda x, shape, *rest, **named: Z.layer_norm(x, *rest, **named)


def embedding(weight: Tensor, indices: Tensor, padding_idx: int | None = None, **unusual: Any) -> Any:
    if any(value not in (None, False) for name, value in unusual.items() if name != "norm_type"):
        return None
    return lambda weight, indices, padding_idx=None, **rest: Z.embedding(indices, weight, padding_idx)


def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, **named: Any) -> Any:
    causal, fits = named.get("is_causal", False), q.dim() == 4 and k.shape == v.shape and q.shape[-1] == k.shape[-1]
    if attn_mask is not None or dropout_p or not fits or (causal and q.shape[2] != k.shape[2]):
        return None

    def ours(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **rest: Any) -> Tensor:
        options = Z.AttentionOptions(scale=scale)
        return Z.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal, options).transpose(1, 2)

    return ours


def cross_entropy(x: Tensor, target: Tensor, weight: Any = None, reduction: str = "mean", **named: Any) -> Any:
    if x.dim() != 2 or weight is not None or target.is_floating_point():
        return None
    return lambda x, target, reduction="mean", **named: Z.linear_cross_entropy(
        x, torch.eye(x.shape[1], dtype=x.dtype), target, None, reduction, Z.CrossEntropyOptions(**named)
    )


OPS = {
    "linear": linear,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "embedding": embedding,
    "scaled_dot_product_attention": attention,
    "cross_entropy": cross_entropy,
}


@pytest.mark.parametrize("name", OPS)
def test_ops(databases: Any, name: str) -> None:
    """Our function for those samples that it takes; the functions above say which, and how it is called."""
    op, taken = databases[1][f"nn.functional.{name}"], 0
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        arguments = (sample.input, *sample.args), sample.kwargs
        ours = OPS[name](*arguments[0], **arguments[1])
        if ours is None:
            continue
        taken += 1
        expected = results(op.op, arguments, "torch")
        for how in WAYS:
            shapes = [list(t.shape) for t in arguments[0] if isinstance(t, Tensor)]
            assert_equal(results(ours, arguments, how), expected, f"{name} {shapes} {arguments[1]}, {how}")
    assert taken >= 2
