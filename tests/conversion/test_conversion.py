"""convert keeps objects, parameters, hooks and keys; restore undoes it; unconverted says what stayed and why, coverage
how much waits."""

from __future__ import annotations

import abc
import copy
import inspect
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zbkern
from zbkern import testing
from zbkern.conversion.interception import Intercepted
from zbkern.kernels.dispatch import UnavailableError


class Special(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def make() -> nn.Module:
    return nn.ModuleDict(
        {
            "plain": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.RMSNorm(4)),
            "embedding": nn.Embedding(5, 4),
            "special": Special(4, 4),
            "sparse": nn.Embedding(5, 4, sparse=True),
            "planes": nn.LayerNorm((2, 4)),
            "convolution": nn.Conv1d(2, 2, 1),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        }
    )


def test_convert_keeps_everything_and_restore_undoes_it() -> None:
    model = make()
    kinds, objects = [type(m) for m in model.modules()], [id(m) for m in model.modules()]
    parameters, keys = [id(p) for p in model.parameters()], list(model.state_dict())
    calls = []
    model["plain"][0].register_forward_hook(lambda *_: calls.append(1))
    assert zbkern.convert(model) is model
    assert type(model["plain"][0]) is zbkern.nn.Linear
    assert type(model["plain"][2]) is zbkern.nn.LayerNorm
    assert type(model["plain"][3]) is zbkern.nn.RMSNorm
    assert type(model["embedding"]) is zbkern.nn.Embedding
    assert isinstance(model["plain"][0], nn.Linear)
    for name, kind in (("special", Special), ("planes", nn.LayerNorm), ("convolution", nn.Conv1d)):
        assert isinstance(model[name], Intercepted)
        assert isinstance(model[name], kind)
        assert type(model[name]).__name__ == kind.__name__
    assert model["plain"][0].zbkern_name == "plain.0"
    model["plain"](torch.randn(2, 4))
    assert calls == [1]
    zbkern.convert(model)  # a second time changes nothing
    assert [id(m) for m in model.modules()] == objects
    assert [id(p) for p in model.parameters()] == parameters
    assert list(model.state_dict()) == keys
    assert zbkern.restore(model) is model
    assert [type(m) for m in model.modules()] == kinds


def test_unconverted_gives_names_and_reasons() -> None:
    reasons = zbkern.unconverted(zbkern.convert(make()))
    assert "sparse" in reasons.pop("sparse")
    assert list(reasons) == ["normed.parametrizations.weight"]


class Configured:
    """What a library adds to torch's classes: no arithmetic."""


class OwnLinear(nn.Linear, Configured): ...


class OwnEmbedding(nn.Embedding, Configured): ...


class OwnRMSNorm(nn.RMSNorm, Configured): ...


class OwnLayerNorm(nn.LayerNorm, Configured): ...


class Abstract(abc.ABC, nn.Linear):
    """Its objects are laid out by ABC, and not by Module as those of other classes."""


class AbstractRouter(abc.ABC, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    @abc.abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class Router(AbstractRouter):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight).softmax(-1)


class OwnNorm(nn.Module):
    def __init__(self, features: int = 16, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, features))
        self.epsilon = eps

    def _norm(self, wide: Tensor) -> Tensor:
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        rounded = self._norm(hidden.float()).type_as(hidden)
        return rounded * self.weight


TWINS: list[tuple[Callable[[], nn.Module], type]] = [
    (lambda: nn.Linear(4, 4), zbkern.nn.Linear),
    (lambda: OwnLinear(4, 4), zbkern.nn.Linear),
    (lambda: Abstract(4, 4), zbkern.nn.Linear),
    (Router, Intercepted),
    (lambda: OwnEmbedding(5, 4), zbkern.nn.Embedding),
    (lambda: OwnRMSNorm(4), zbkern.nn.RMSNorm),
    (lambda: OwnLayerNorm(4), zbkern.nn.LayerNorm),
    (lambda: OwnLayerNorm((3, 4)), Intercepted),  # has no twin of two dimensions
    (lambda: OwnNorm(4), zbkern.nn.ForeignRMSNorm),
    (lambda: nn.Conv1d(3, 3, 3), Intercepted),
    (lambda: nn.LSTM(4, 3), Intercepted),  # which leaves out of pickles what cannot be in them
]


@pytest.mark.parametrize(("make", "twin"), TWINS)
def test_a_module_of_a_twins_class_is_copied_pickled_and_restored(
    make: Callable[[], nn.Module], twin: type[nn.Module]
) -> None:
    model, calls, file = nn.Sequential(make()), [], io.BytesIO()
    kind, plain = type(model[0]), copy.deepcopy(model)
    handle = model[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        zbkern.convert(model)
    assert not calls
    handle.remove()
    assert isinstance(model[0], twin)
    assert isinstance(model[0], kind)
    assert zbkern.unconverted(model) == {}
    x = torch.tensor([1, 3]) if twin is zbkern.nn.Embedding else torch.randn(3, 4)
    queue = zbkern.WGradQueue()
    with queue.defer():
        y = pytree.tree_leaves(model(x))[0]
        y.square().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    queue.run()
    expected = pytree.tree_leaves(plain(x))[0]
    expected.square().sum().backward()
    testing.assert_close(y, expected)
    testing.assert_same_gradients(model, plain)
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert type(other[0]) is type(model[0]) is not kind
        assert other[0].zbkern_name == "0"
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
        assert torch.equal(pytree.tree_leaves(other(x))[0], y)
        assert type(zbkern.restore(other)[0]) is kind
        assert "zbkern_name" not in vars(other[0])


def test_a_class_derived_from_a_twin_is_copied_and_pickled_as_others() -> None:
    """Parametrizations derive one, and refuse pickles in their own words."""
    module = zbkern.convert(nn.Sequential(OwnLinear(4, 4)))
    nn.utils.parametrizations.weight_norm(module[0])
    twin, x = copy.deepcopy(module), torch.ones(1, 4)
    assert torch.equal(twin(x), module(x))
    with pytest.raises(RuntimeError, match="parametrized modules is only supported through state_dict"):
        pickle.dumps(module)
    kind = type(module[0])
    module = zbkern.convert(nn.Sequential(OwnLinear(4, 4)))
    module[0].__class__ = type("Derived", (type(module[0]),), {})
    twin = copy.deepcopy(module)
    assert type(twin[0]) is type(module[0]) is not kind
    assert torch.equal(twin(x), module(x))


class OwnForward(nn.Embedding):
    def forward(self, indices: Tensor) -> Tensor:
        return nn.functional.embedding(indices, self.weight)


class TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, scale: float = 2.0, *, shift: int = 0) -> Tensor:
        return scale * (x @ self.weight) + shift


@pytest.mark.parametrize("make", [*(make for make, _ in TWINS[1:]), lambda: OwnForward(5, 4), TwoArguments])
def test_forwards_keep_their_signature(make: Callable[[], nn.Module]) -> None:
    """torchtitan reads from it by which names to pass positional arguments on."""
    module = make()
    expected = inspect.signature(type(module).forward)
    converted = zbkern.convert(copy.deepcopy(module))
    assert type(converted) is not type(module)
    assert inspect.signature(type(converted).forward) == expected
    x = torch.tensor([1, 2]) if isinstance(module, nn.Embedding) else torch.randn(3, 4)
    assert torch.equal(*(pytree.tree_leaves(y)[0] for y in (converted(**{list(expected.parameters)[1]: x}), module(x))))


def test_coverage_is_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 4))
    model[0].weight.grad = gradient = torch.ones(6, 4)
    x = torch.randn(8, 4)
    state = torch.get_rng_state()
    assert zbkern.coverage(model, lambda: model(x).sum()) == (0.0, {"0.weight": 0.5, "3.weight": 0.5})
    zbkern.convert(model, filter=lambda name, module: name == "0")
    found = zbkern.coverage(model, lambda: model(x).sum())
    assert str(found) == "50.0% of the weight gradient is deferred; computed in B: 3.weight (50.0%)"
    zbkern.convert(model)
    assert str(zbkern.coverage(model, lambda: model(x).sum())) == "100.0% of the weight gradient is deferred"
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(6, 4))
    assert all(parameter.grad is None for parameter in model[1:].parameters())
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="coverage: loss must depend on parameters of model"):
        zbkern.coverage(model, lambda: torch.ones((), requires_grad=True))


def test_coverage_names_the_largest_five() -> None:
    model = nn.ModuleList([nn.Linear(2, size) for size in range(1, 9)])
    found = zbkern.coverage(model, lambda: sum(layer(torch.ones(1, 2)).sum() for layer in model))
    assert next(iter(found.not_deferred)) == "7.weight"
    assert str(found).endswith("3.weight (11.1%) and 3 more")


def test_a_weight_that_waits_in_one_use_only_does_not_wait() -> None:
    """Its gradient is whole only once B and W have both added to it; half of it is computed in B."""
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    model[1].weight = model[0].weight
    zbkern.convert(model, filter=lambda name, module: name == "0")
    found = zbkern.coverage(model, lambda: model[1](model[0](torch.ones(1, 3))).sum())
    assert found == (0.0, {"0.weight": 1.0})


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 4, dtype=torch.complex128),
        lambda: nn.Embedding(5, 4, dtype=torch.complex64),
        lambda: nn.RMSNorm(4, dtype=torch.complex64),
        lambda: OwnNorm(4).to(torch.complex64),
    ],
)
def test_complex_modules_stay_as_they_are(make: Callable[[], nn.Module]) -> None:
    module = make()
    kind = type(module)
    assert type(zbkern.convert(module)) is kind
    assert zbkern.unconverted(module) == {"": "its parameters are complex; zbkern's layers are for real numbers"}


def test_lazy_modules_are_converted_once_they_have_a_shape() -> None:
    model = zbkern.convert(nn.Sequential(nn.LazyLinear(4), nn.LazyConv1d(2, 1)))
    assert [type(module) for module in model] == [nn.LazyLinear, nn.LazyConv1d]
    assert set(zbkern.unconverted(model).values()) == {
        "its parameters have no shape yet; call it once, then convert it"
    }
    model[0](torch.ones(2, 3))
    assert type(zbkern.convert(model)[0]) is zbkern.nn.Linear


def test_filter_chooses() -> None:
    model = zbkern.convert(make(), filter=lambda name, module: name == "plain.0")
    assert type(model["plain"][0]) is zbkern.nn.Linear
    assert type(model["embedding"]) is nn.Embedding
    assert "filtered out" in zbkern.unconverted(model)["embedding"]
    zbkern.convert(model)
    zbkern.restore(model, filter=lambda name, module: name == "embedding")
    assert type(model["plain"][0]) is zbkern.nn.Linear
    assert type(model["embedding"]) is nn.Embedding


ANOTHER_TORCH = {**globals(), "torch": types.SimpleNamespace(rsqrt=lambda x: 2 * torch.rsqrt(x))}
LIKE_IT: dict[str, dict[str, Any]] = {
    "1 + weight": {"forward": lambda self, x: self._norm(x.float()).type_as(x) * (1 + self.weight)},
    "clamps": {"forward": lambda self, x: OwnNorm.forward(self, x.clamp(-1e4, 1e4))},
    "repairs NaN": {"forward": lambda self, x: OwnNorm.forward(self, torch.nan_to_num(x))},
    "by shape": {"forward": lambda self, x: OwnNorm.forward(self, x) / (1 + (len(x) > 64))},
    "in float32": {"forward": lambda self, x: OwnNorm.forward(self, x).float()},
    "gated": {"forward": lambda self, x, gate=1: OwnNorm.forward(self, x * gate)},
    "over tokens": {"_norm": lambda self, x: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.epsilon)},
    "no gradient": {"_norm": lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon).detach()},
    "another torch": {"_norm": types.FunctionType(OwnNorm._norm.__code__, ANOTHER_TORCH)},
    "two eps": {"variance_epsilon": 0.5},
}


@pytest.mark.parametrize("name", [*LIKE_IT, "a method of its own", "a buffer"])
def test_norms_that_only_look_like_it_keep_their_forward(name: str) -> None:
    """Whatever the input: no norm that does anything else for some of them is replaced."""
    module = type("Norm", (OwnNorm,), LIKE_IT.get(name, {}))()
    if name == "a method of its own":
        module._norm = torch.tanh
    elif name == "a buffer":
        module.register_buffer("calls", torch.zeros(()))
    twin = zbkern.convert(copy.deepcopy(module))
    assert isinstance(twin, Intercepted)
    for x in (1e5 * torch.randn(3, 16), torch.full((2, 16), float("nan")), torch.randn(128, 16)):
        assert torch.equal(twin(x).nan_to_num(7), module(x).nan_to_num(7))


def test_a_forward_that_was_replaced_stays() -> None:
    module = OwnNorm()
    module.forward = lambda hidden: hidden
    assert type(zbkern.convert(module)) is OwnNorm
    assert zbkern.unconverted(module) == {"": "its forward was replaced, on this object alone"}


@pytest.mark.parametrize(("given", "kept"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_mixed_dtypes_are_the_librarys_matter(given: torch.dtype, kept: torch.dtype) -> None:
    module, x = OwnNorm().to(kept), torch.randn(4, 16, dtype=given)
    expected = module(x)
    found = zbkern.convert(module)(hidden=x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_impl_goes_with_the_modules() -> None:
    model = nn.Sequential(OwnNorm(), nn.Linear(16, 4), zbkern.nn.MLP(4, 4), nn.Conv1d(1, 1, 1))
    assert zbkern.convert(model, impl="torch") is model
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [getattr(module, "zbkern_impl", None) for module in copied] == ["torch"] * 4
    assert "impl='torch'" in repr(model[0])
    assert "impl='torch'" in repr(model[1])
    zbkern.convert(model)  # says nothing about it
    assert model[1].zbkern_impl == "torch"
    zbkern.convert(model, filter=lambda name, module: name == "0", impl="cuda")
    assert [module.zbkern_impl for module in model[:2]] == ["cuda", "torch"]
    with pytest.raises(UnavailableError, match="rms_norm: impl='cuda' cannot run on cpu"):
        model(torch.ones(2, 16))
    zbkern.restore(model)
    assert "zbkern_impl" not in vars(model[0])
    assert type(model[0]) is OwnNorm
    with pytest.raises(ValueError, match=r"convert: impl must be one of .* got 'magic'"):
        zbkern.convert(model, impl="magic")
    assert type(model[0]) is OwnNorm
