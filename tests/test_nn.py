"""Modules against their torch twins: same constructor, same state, same numbers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zbkern
from zbkern import testing
from zbkern.functional import AttentionOptions, CrossEntropyOptions, GateOptions
from zbkern.kernels.dispatch import UnavailableError

TWINS = [
    (zbkern.nn.Linear, nn.Linear, (5, 3), {}),
    (zbkern.nn.Linear, nn.Linear, (5, 3), {"bias": False}),
    (zbkern.nn.Embedding, nn.Embedding, (9, 5), {"padding_idx": 2}),
    (zbkern.nn.Embedding, nn.Embedding, (9, 5), {"scale_grad_by_freq": True}),
    (zbkern.nn.LayerNorm, nn.LayerNorm, (5,), {"eps": 1e-3}),
    (zbkern.nn.LayerNorm, nn.LayerNorm, ((4, 5),), {}),
    (zbkern.nn.LayerNorm, nn.LayerNorm, (5,), {"elementwise_affine": False}),
    (zbkern.nn.RMSNorm, nn.RMSNorm, (5,), {}),
    (zbkern.nn.RMSNorm, nn.RMSNorm, ((4, 5),), {"eps": 1e-2}),
]


@pytest.mark.parametrize(("ours", "torchs", "arguments", "options"), TWINS)
def test_twins(ours: type, torchs: type, arguments: tuple, options: dict) -> None:
    torch.manual_seed(0)
    module = ours(*arguments, **options, dtype=torch.float64)
    other = torchs(*arguments, **options, dtype=torch.float64)
    assert list(module.state_dict()) == list(other.state_dict())
    other.load_state_dict(module.state_dict())
    x, residual = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    calls = [(torch.randint(9, (4, 4)),)] if isinstance(other, nn.Embedding) else [(x,), (x,)]
    if "Norm" in ours.__name__:
        calls.append((x, residual))
    queue = zbkern.WGradQueue()
    for given in calls:
        y, expected = module(*given), other(sum(given))
        if len(given) == 2:
            y, summed = y
            testing.assert_close(summed, x + residual)
        testing.assert_close(y, expected)
        if y.requires_grad:
            with queue.defer():
                y.square().sum().backward()
            expected.square().sum().backward()
    queue.run()
    testing.assert_same_gradients(module, other)
    again = pickle.loads(pickle.dumps(module))
    testing.assert_close(again(*calls[0]), other(*calls[0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_eps_of_a_norm_that_names_none_is_torchs(dtype: torch.dtype) -> None:
    x = torch.linspace(1e-4, 1e-3, 20, dtype=dtype).view(4, 5)  # of which the eps is a part
    module, other = zbkern.nn.RMSNorm(5, dtype=dtype), nn.RMSNorm(5, dtype=dtype)
    testing.assert_close(module(x), other(x))
    testing.assert_close(module(x, x.double())[0], other.double()(x + x.double()))


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", ["a hook", "another module"])
def test_mlp_calls_linears_that_are_more_than_their_products(change: str) -> None:
    torch.manual_seed(0)
    module, x = zbkern.nn.MLP(128, 128), torch.randn(3, 128)
    expected = module(x)
    if change == "a hook":
        module.down.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        doubled = Doubled(128, 128, bias=False)
        doubled.load_state_dict(module.down.state_dict())
        module.down = doubled
    torch.testing.assert_close(module(x), 2 * expected)


def attend(m: zbkern.nn.Attention, x: torch.Tensor, ends: Any = None, rotary: Any = None) -> torch.Tensor:
    heads = [m.num_heads, m.num_kv_heads, m.num_kv_heads]
    q, k, v = m.qkv(x).unflatten(-1, (-1, m.head_dim)).split(heads, -2)
    if rotary is not None:
        q, k = (zbkern.functional.rotary(t, *rotary) for t in (q, k))
    y = zbkern.functional.attention(q, k, v, m.causal, m.options, ends, sinks=m.sinks)
    return m.output(y.flatten(-2))


def mixed(m: zbkern.nn.Experts, x: torch.Tensor, counts: Any) -> torch.Tensor:
    biases, weights = (m.gate_up_proj_bias, m.down_proj_bias), (m.gate_up_proj, m.down_proj)
    return zbkern.functional.grouped_mlp(x, *weights, counts, biases, m.gate, transposed=m.transposed)


DOUBLE = {"dtype": torch.float64}
X, ANGLES = torch.randn(2, 6, 16, **DOUBLE), torch.randn(6, 1, **DOUBLE)
TURNS, CAPPED = (ANGLES.cos(), ANGLES.sin()), AttentionOptions(softcap=2.0)
GPT_OSS = GateOptions("silu", True, 0.4, 1.702, 1.0)
LABELS = torch.tensor([[1, -100, 2, 3, 3, 0], [8, 0, 0, 1, 4, -100]])
MADE_OF_OPS: dict[str, tuple[nn.Module, Any, tuple]] = {
    "MLP": (zbkern.nn.MLP(16, 7, "gelu", **DOUBLE), lambda m, x: m.down(F.gelu(m.gate(x)) * m.up(x)), (X,)),
    "MLP with biases": (
        zbkern.nn.MLP(16, 7, bias=True, **DOUBLE), lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), (X,)
    ),
    "attention": (zbkern.nn.Attention(16, 4, bias=True, **DOUBLE), attend, (X,)),
    "attention of two groups": (zbkern.nn.Attention(16, 4, 2, causal=True, **DOUBLE), attend, (X, None, TURNS)),
    "attention, packed": (
        zbkern.nn.Attention(16, 4, 1, causal=True, options=CAPPED, sinks=True, **DOUBLE), attend,
        (X[0], torch.tensor([0, 2, 6])),
    ),
    "experts": (zbkern.nn.Experts(16, 6, 3, **DOUBLE), mixed, (X[0], torch.tensor([1, 0, 5]))),
    "experts of gpt-oss": (
        zbkern.nn.Experts(16, 6, 3, GPT_OSS, True, transposed=True, **DOUBLE), mixed, (X[0], [2, 3, 1])
    ),
    "head": (
        zbkern.nn.LinearCrossEntropy(16, 9, True, options=CrossEntropyOptions(label_smoothing=0.1), **DOUBLE),
        lambda m, x, t: zbkern.functional.linear_cross_entropy(x, m.weight, t, m.bias, options=m.options), (X, LABELS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE_OF_OPS)
def test_a_layer_is_its_ops_with_its_parameters(name: str) -> None:
    """Two deferred backwards against those of the ops, which test_functional.py holds to torch's."""
    module, forward, inputs = MADE_OF_OPS[name]
    module, other, queue = copy.deepcopy(module), copy.deepcopy(module), zbkern.WGradQueue()
    for _ in range(2):
        y, expected = module(*inputs), forward(other, *inputs)
        testing.assert_close(y, expected)
        with queue.defer():
            y.square().sum().backward()
        expected.square().sum().backward()
    assert all(p.grad is None for p in module.parameters())
    assert queue.run() > 0
    testing.assert_same_gradients(module, other)


LAYERS: dict[str, Any] = {
    "Linear": lambda **o: zbkern.nn.Linear(4, 4, **o),
    "Embedding": lambda **o: zbkern.nn.Embedding(7, 4, **o),
    "LayerNorm": lambda **o: zbkern.nn.LayerNorm(4, **o),
    "RMSNorm": lambda **o: zbkern.nn.RMSNorm(4, **o),
    "MLP": lambda **o: zbkern.nn.MLP(4, 6, **o),
    "Attention": lambda **o: zbkern.nn.Attention(4, 2, **o),
    "Experts": lambda **o: zbkern.nn.Experts(4, 3, 2, **o),
    "LinearCrossEntropy": lambda **o: zbkern.nn.LinearCrossEntropy(4, 9, **o),
}


def called(name: str, layer: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 3 * 2 * 4).view(2, 3, 4)
    if name == "Embedding":
        return layer(torch.tensor([[0, 3, 3], [2, 0, 6]]))
    if name == "Experts":
        return layer(x.flatten(0, 1), [2, 4])
    return layer(x, torch.tensor([[0, 3, 3], [2, 0, 6]])) if name == "LinearCrossEntropy" else layer(x)


@pytest.mark.parametrize("name", LAYERS)
def test_a_named_implementation_is_the_one_that_runs(name: str) -> None:
    torch.manual_seed(0)
    ours = LAYERS[name](impl="torch")
    assert "impl='torch'" in repr(ours)
    assert ours.zbkern_impl == "torch"
    plain = LAYERS[name]()
    assert plain.zbkern_impl == "auto"
    assert "impl" not in repr(plain)
    with pytest.raises(UnavailableError, match="impl='cuda' cannot run on cpu"):
        called(name, LAYERS[name](impl="cuda"))
    with pytest.raises(ValueError, match=f"{name}: impl must be one of .* got 'magic'"):
        LAYERS[name](impl="magic")
