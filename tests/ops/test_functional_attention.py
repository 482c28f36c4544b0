"""Attention and rotary embeddings against the formula written out, in float64."""

from __future__ import annotations

import functools
import itertools
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from zbkern import functional as Z
from zbkern import testing, wgrad


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Z.AttentionOptions, sinks: Tensor | None, ends: list[int]
) -> Tensor:
    """Every head of every sequence by itself; queries and keys have the same sequences."""
    y = q.new_zeros(*q.shape[:2], v.shape[2])
    for (a, b), head in itertools.product(pairwise(ends), range(q.shape[1])):
        one = head * k.shape[1] // q.shape[1]
        scores = q[a:b, head] @ k[a:b, one].T * (q.shape[2] ** -0.5 if options.scale is None else options.scale)
        if options.softcap is not None:
            scores = options.softcap * (scores / options.softcap).tanh()
        place = torch.arange(b - a)
        distance = place[:, None] - place
        if causal:
            scores = scores.masked_fill((distance < 0) | (distance >= (options.window or 99)), float("-inf"))
        total = scores.exp().sum(1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
        y = y.index_put((torch.arange(a, b), torch.tensor(head)), scores.exp() / total @ v[a:b, one])
    return y


def check(causal: bool, options: Z.AttentionOptions, heads: int, sinks: bool, form: str, value_size: int) -> None:
    """form: how sequences are given, all of one length as a batch, or packed."""
    torch.manual_seed(0)
    ends = [0, 6, 12] if form == "batch" else [0, 4, 4, 5, 11]
    tokens = ends[-1] + 2 * (form == "on the device")  # beyond the last end there is nothing
    rand = functools.partial(torch.randn, dtype=torch.float64, requires_grad=True)
    q, k, v = rand(tokens, 4, 6), rand(tokens, heads, 6), rand(tokens, heads, value_size)
    inputs = (q, k, v, rand(4)) if sinks else (q, k, v)

    def ours(*inputs: Tensor) -> Tensor:
        level = inputs[3] if sinks else None
        if form == "batch":
            return Z.attention(*(t.unflatten(0, (2, 6)) for t in inputs[:3]), causal, options, sinks=level).flatten(
                0, 1
            )
        given = torch.tensor(ends, dtype=torch.int32) if form == "on the device" else ends
        return Z.attention(*inputs[:3], causal, options, given, sinks=level)

    y = ours(*inputs)
    expected = by_formula(q, k, v, causal, options, inputs[3] if sinks else None, ends)
    testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, inputs, dy)
    for got, right in zip(torch.autograd.grad(y, inputs, dy), wanted, strict=True):
        testing.assert_close(got, right)
    if value_size != q.shape[2]:  # else torch's own core, which has no second derivative
        assert torch.autograd.gradgradcheck(ours, inputs, fast_mode=True)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
@pytest.mark.parametrize("form", ["batch", "packed"])
def test_attention(heads: int, causal: bool, window: int | None, form: str) -> None:
    check(causal, Z.AttentionOptions(window), heads, False, form, 6)


@pytest.mark.parametrize("strided", [0, 1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_inputs_whose_features_are_apart_in_memory(causal: bool, strided: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(5, heads, 6, dtype=torch.float64) for heads in (4, 2, 2)]
    inputs[strided] = inputs[strided].mT.contiguous().mT
    inputs = [t.requires_grad_() for t in inputs]
    y = Z.attention(*inputs, causal, cu_seqlens=[0, 2, 5])
    expected = by_formula(*inputs, causal, Z.AttentionOptions(), None, [0, 2, 5])
    testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, inputs, dy)
    for got, right in zip(torch.autograd.grad(y, inputs, dy), wanted, strict=True):
        testing.assert_close(got, right)


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("heads", [4, 2])
def test_any_scale(heads: int, scale: float) -> None:
    check(True, Z.AttentionOptions(scale=scale), heads, False, "batch", 6)


@pytest.mark.parametrize("form", ["packed", "on the device"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("causal", [False, True])
def test_sinks_caps_and_values_of_another_size(causal: bool, softcap: float | None, sinks: bool, form: str) -> None:
    check(causal, Z.AttentionOptions(softcap=softcap), 2, sinks, form, 3)


def test_sinks_wait_for_w() -> None:
    q, k, v = torch.randn(3, 1, 5, 2, 4, dtype=torch.float64).unbind(0)
    sinks = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    Z.attention(q, k, v, sinks=sinks).sum().backward()
    expected, sinks.grad = sinks.grad, None
    queue = wgrad.WGradQueue()
    for _ in range(2):
        with queue.defer():
            Z.attention(q, k, v, sinks=sinks).sum().backward()
    assert sinks.grad is None
    queue.run()
    testing.assert_close(sinks.grad, 2 * expected)


def test_a_query_that_sees_no_key_is_zero_with_a_cap_and_sinks() -> None:
    q, k, v = torch.randn(1, 5, 1, 3), torch.randn(1, 2, 1, 3), torch.randn(1, 2, 1, 3)
    sinks = torch.zeros(1, requires_grad=True)
    for level in (None, sinks):
        q.requires_grad_()
        y = Z.attention(q, k, v, True, Z.AttentionOptions(softcap=2.0), sinks=level)
        assert bool((y[:, :3] == 0).all())
        assert bool((y[:, 3:] != 0).all())
        assert bool((torch.autograd.grad(y.sum(), q)[0][:, :3] == 0).all())


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("sinks", [False, True])
def test_fewer_queries_than_keys_are_the_last_ones(heads: int, sinks: bool) -> None:
    torch.manual_seed(0)
    rand = functools.partial(torch.randn, dtype=torch.float64, requires_grad=True)
    q, k, v = rand(2, 2, 4, 6), rand(2, 5, heads, 6), rand(2, 5, heads, 6)
    inputs = (q, k, v, rand(4)) if sinks else (q, k, v)
    level = inputs[3] if sinks else None
    y = Z.attention(q, k, v, causal=True, sinks=level)
    expected = Z.attention(torch.cat([q.new_zeros(2, 3, 4, 6), q], 1), k, v, causal=True, sinks=level)[:, 3:]
    testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, inputs, dy)
    for got, right in zip(torch.autograd.grad(y, inputs, dy), wanted, strict=True):
        testing.assert_close(got, right)


def rotated_by_hand(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """As the transformers library writes it, in modeling_llama and in modeling_gptj, on the first columns."""
    size = 2 * angles.shape[1]
    turning, rest = x[..., :size], x[..., size:]
    if interleaved:
        wide = angles.repeat_interleave(2, -1)[:, None]
        other = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        wide = torch.cat((angles, angles), -1)[:, None]
        other = torch.cat((-turning[..., size // 2 :], turning[..., : size // 2]), -1)
    return torch.cat((turning * wide.cos() + other * wide.sin(), rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 8), (2, 3, 2, 8), (2, 1, 3, 2, 11)])
@pytest.mark.parametrize("half", [0, 1, 3, 4])
def test_rotary(shape: tuple[int, ...], half: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape[:-2], 2 * shape[-2], shape[-1], dtype=torch.float64)[..., ::2, :].requires_grad_()
    angles = torch.randn(3, half, dtype=torch.float64)

    def ours(x: Tensor) -> Tensor:
        return Z.rotary(x, angles.cos(), angles.sin(), interleaved)

    y, expected = ours(x), rotated_by_hand(x, angles, interleaved)
    testing.assert_close(y, expected)
    dy = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)[..., ::2]
    testing.assert_close(torch.autograd.grad(y, x, dy, retain_graph=True)[0], torch.autograd.grad(expected, x, dy)[0])
    assert torch.autograd.gradcheck(ours, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(ours, x, fast_mode=True)
    # under function transforms it is torch's own operations
    testing.assert_close(torch.func.grad(lambda x: (ours(x) * dy).sum())(x.detach()), torch.autograd.grad(y, x, dy)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_rounds_once(interleaved: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(2, 5, 3, 8).to(dtype).requires_grad_(), torch.randn(5, 3)
    y = Z.rotary(x, angles.cos(), angles.sin(), interleaved)
    wide = rotated_by_hand(x.detach().float(), angles, interleaved)
    testing.assert_close(y, wide, tolerance=torch.finfo(dtype).eps)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
