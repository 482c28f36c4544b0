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
    embeds = isinstance(other, nn.Embedding)
    x = torch.randint(9, (4, 4)) if embeds else torch.randn(3, 4, 5, dtype=torch.float64)
    testing.assert_close(module(x), other(x))
    if not list(module.parameters()):
        return
    queue = zbkern.WGradQueue()
    for _ in range(2):
        with queue.defer():
            module(x).square().sum().backward()
        other(x).square().sum().backward()
    queue.run()
    testing.assert_same_gradients(module, other)
    again = pickle.loads(pickle.dumps(module))
    testing.assert_close(again(x), other(x))


@pytest.mark.parametrize(("ours", "shape"), [(o, s) for o in ("LayerNorm", "RMSNorm") for s in ((5,), (4, 5))])
def test_norms_with_a_residual(ours: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, other = (getattr(library, ours)(shape, dtype=torch.float64) for library in (zbkern.nn, nn))
    x, residual = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    queue = zbkern.WGradQueue()
    with queue.defer():
        y, summed = module(x, residual)
        (y * summed).sum().backward()
    queue.run()
    expected = other(x + residual)
    (expected * (x + residual)).sum().backward()
    testing.assert_close(y, expected)
    testing.assert_close(summed, x + residual)
    testing.assert_same_gradients(module, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_eps_of_a_norm_that_names_none_is_torchs(dtype: torch.dtype) -> None:
    x = torch.linspace(1e-4, 1e-3, 20, dtype=dtype).view(4, 5)  # of which the eps is a part
    module, other = zbkern.nn.RMSNorm(5, dtype=dtype), nn.RMSNorm(5, dtype=dtype)
    testing.assert_close(module(x), other(x))
    testing.assert_close(module(x, x.double())[0], other.double()(x + x.double()))


def check(module: nn.Module, forward: Any, *inputs: Any) -> None:
    """Two deferred backwards of module(*inputs) against those of forward(copy, *inputs)."""
    other = copy.deepcopy(module)
    queue = zbkern.WGradQueue()
    for _ in range(2):
        y, expected = module(*inputs), forward(other, *inputs)
        testing.assert_close(y, expected)
        with queue.defer():
            y.square().sum().backward()
        expected.square().sum().backward()
    assert queue.run() > 0
    testing.assert_same_gradients(module, other)


@pytest.mark.parametrize("bias", [True, False])
def test_mlp(bias: bool) -> None:
    module = zbkern.nn.MLP(5, 7, "gelu", bias, dtype=torch.float64)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    check(
        module,
        lambda m, x: F.linear(
            F.gelu(F.linear(x, m.gate.weight, m.gate.bias)) * F.linear(x, m.up.weight, m.up.bias),
            m.down.weight,
            m.down.bias,
        ),
        x,
    )


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", ["a hook", "another module", "a recipe"])
def test_mlp_calls_linears_that_are_more_than_their_products(change: str) -> None:
    torch.manual_seed(0)
    module, x, factor = zbkern.nn.MLP(128, 128), torch.randn(3, 128), 2.0
    expected = module(x)
    if change == "a hook":
        module.down.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif change == "another module":
        doubled = Doubled(128, 128, bias=False)
        doubled.load_state_dict(module.down.state_dict())
        module.down = doubled
    else:
        module.down.zbkern_recipe, factor = "fp8_blockwise", 1.0
        assert not torch.equal(module(x), expected)  # rounded
    torch.testing.assert_close(module(x), factor * expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
def test_attention(num_kv_heads: int | None) -> None:
    module = zbkern.nn.Attention(8, 4, num_kv_heads, causal=True, bias=True, dtype=torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64)

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, m.qkv.weight, m.qkv.bias).split([8, m.num_kv_heads * 2, m.num_kv_heads * 2], -1)
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(-2), m.output.weight, m.output.bias)

    check(module, forward, x)


@pytest.mark.parametrize("size", [4, 2])
def test_attention_with_rotary_turns_queries_and_keys(size: int) -> None:
    module = zbkern.nn.Attention(16, 4, 2, causal=True, dtype=torch.float64)
    x, angles = torch.randn(2, 6, 16, dtype=torch.float64), torch.randn(6, size // 2, dtype=torch.float64)
    rotary = angles.cos(), angles.sin()

    def forward(m: nn.Module, x: torch.Tensor, cu_seqlens: None, rotary: Any) -> torch.Tensor:
        q, k, v = F.linear(x, m.qkv.weight).unflatten(-1, (8, 4)).split([4, 2, 2], -2)
        q, k = (zbkern.functional.rotary(t, *rotary) for t in (q, k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(-2), m.output.weight)

    check(module, forward, x, None, rotary)
    packed = module(x.flatten(0, 1), cu_seqlens=[0, 6, 12], rotary=tuple(t.repeat(2, 1) for t in rotary))
    testing.assert_close(packed, module(x, rotary=rotary).flatten(0, 1))


def test_attention_with_sinks_and_a_cap() -> None:
    options = AttentionOptions(softcap=2.0)
    module = zbkern.nn.Attention(8, 4, 2, causal=True, options=options, sinks=True, dtype=torch.float64)
    x = torch.randn(6, 8, dtype=torch.float64)
    ends = torch.tensor([0, 2, 6])

    def forward(m: nn.Module, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, m.qkv.weight).unflatten(-1, (8, 2)).split([4, 2, 2], -2)
        y = zbkern.functional.attention(q, k, v, True, options, cu_seqlens, sinks=m.sinks)
        return F.linear(y.flatten(-2), m.output.weight)

    check(module, forward, x, ends)


EXPERTS: dict[str, dict[str, Any]] = {
    "silu": {},
    "geglu": {"gate": GateOptions("gelu"), "bias": True},
    "gpt-oss": {"gate": GateOptions("silu", True, 0.4, 1.702, 1.0), "bias": True, "transposed": True},
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str) -> None:
    """Counts on the host, as a tensor and as offsets; each microbatch has other ones, the last an expert without rows
    and rows without an expert."""
    options = EXPERTS[name]
    module = zbkern.nn.Experts(5, 6, 3, dtype=torch.float64, **options)
    other, queue = copy.deepcopy(module), zbkern.WGradQueue()
    microbatches: list[dict[str, Any]] = [
        {"counts": [2, 0, 5]},
        {"counts": torch.tensor([0, 0, 7])},
        {"offsets": torch.tensor([3, 3, 5], dtype=torch.int32)},
    ]
    for key, rows in enumerate(microbatches):
        x, y = torch.randn(7, 5, dtype=torch.float64).requires_grad_(), torch.randn(7, 5, dtype=torch.float64)
        twin = x.detach().clone().requires_grad_()
        with queue.defer(key):
            found = module(x, **rows)
            found.backward(y)
        sizes = torch.as_tensor(rows["counts"]) if "counts" in rows else torch.tensor([3, 0, 2])
        expected = by_function(other, twin, sizes.tolist())
        expected.backward(y)
        testing.assert_close(found, expected, "y")
        testing.assert_close(x.grad, twin.grad, "dx")
    assert all(p.grad is None for p in module.parameters())
    queue.run()
    testing.assert_same_gradients(module, other)


def by_function(m: zbkern.nn.Experts, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Which test_functional.py holds to experts in a loop; zeros for rows of none."""
    biases = (m.gate_up_proj_bias, m.down_proj_bias)
    rows, weights = x[: sum(sizes)], (m.gate_up_proj, m.down_proj)
    y = zbkern.functional.grouped_mlp(rows, *weights, sizes, biases, m.gate, transposed=m.transposed)
    return torch.cat([y, x.new_zeros(len(x) - sum(sizes), x.shape[1])])


def test_linear_cross_entropy() -> None:
    module = zbkern.nn.LinearCrossEntropy(
        5, 9, bias=True, dtype=torch.float64, options=CrossEntropyOptions(label_smoothing=0.1)
    )
    x, target = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[1, -100, 2], [8, 0, 0]])
    check(
        module,
        lambda m, x, t: F.cross_entropy(F.linear(x, m.weight, m.bias).flatten(0, 1), t.flatten(), label_smoothing=0.1),
        x,
        target,
    )


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
    for layer in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert layer.zbkern_impl == "torch"
        torch.testing.assert_close(called(name, layer), called(name, ours))
    plain = LAYERS[name]()
    assert plain.zbkern_impl == "auto"
    assert "impl" not in repr(plain)
    with pytest.raises(UnavailableError, match="impl='cuda' cannot run on cpu"):
        called(name, LAYERS[name](impl="cuda"))
    with pytest.raises(ValueError, match=f"{name}: impl must be one of .* got 'magic'"):
        LAYERS[name](impl="magic")
