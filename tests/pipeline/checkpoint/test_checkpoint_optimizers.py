"""Any optimizer resumes bit for bit from a checkpoint, whatever it has in its state, or is refused when it is saved."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.checkpointed import LAYERS, MICROBATCHES, assert_same, chunks, layers, state_by_name
from tests.support.checkpointed import train as train_in
from tests.support.chunks import results_on_threads
from zbkern.pipeline import Optimizer, Pipeline, checkpoint, schedules
from zbkern.pipeline.transport.local import LocalTransport


class Homemade(torch.optim.Optimizer):
    """Momentum under an entry of any kind."""

    entry: Any = "m"

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.update(parameter, self.state[parameter])

    def update(self, parameter: Tensor, state: dict[Any, Any]) -> None:
        moment = state.setdefault(self.entry, torch.zeros_like(parameter))
        moment.mul_(0.9).add_(parameter.grad)
        parameter.sub_(moment, alpha=0.1)


class Nested(Homemade):
    """Lists, dicts, strings and counts in the state."""

    def update(self, parameter: Tensor, state: dict[Any, Any]) -> None:
        if not state:
            state.update(history=[torch.zeros_like(parameter)], counts={1: 0, "b": (0, None)}, phase="warm", none=None)
        state["history"][0].add_(parameter.grad)
        state["counts"][1] += 1
        parameter.sub_(state["history"][0] / state["counts"][1], alpha=0.1 if state["phase"] == "warm" else 0.2)
        state["phase"] = {"warm": "cold", "cold": "warm"}[state["phase"]]


class Narrow(Homemade):
    """State of other dtypes and shapes than the parameter's, which torch's load_state_dict would widen."""

    def update(self, parameter: Tensor, state: dict[Any, Any]) -> None:
        if not state:
            state.update(q=torch.zeros_like(parameter, dtype=torch.bfloat16), signs=parameter.to(torch.int8) * 0)
            state.update(row=torch.zeros(len(parameter)), step=torch.zeros((), dtype=torch.int64), many=[], flag=False)
        state["q"] += parameter.grad.bfloat16()
        state["signs"] += parameter.grad.sign().to(torch.int8)
        state["row"] += parameter.grad.flatten(1).sum(1) if parameter.dim() > 1 else parameter.grad
        state["step"] += 1
        state["many"].append(parameter.grad.half().sum())
        rows = state["row"][:, None] if parameter.dim() > 1 else state["row"]
        parameter.sub_((state["q"] / 3 + state["signs"] + rows + sum(state["many"])) / state["step"], alpha=0.01)


class Shared(Homemade):
    """One tensor in the state of all parameters, as tables of quantised ones are, and here it changes, too."""

    def update(self, parameter: Tensor, state: dict[Any, Any]) -> None:
        state["scale"] = self.state[self.param_groups[0]["params"][0]].setdefault("scale", torch.ones(()))
        state["scale"] += 1
        parameter.sub_(parameter.grad / state["scale"], alpha=0.1)


class OfNoParameter(Homemade):
    """A count beside the parameters' state."""

    def step(self, closure: Any = None) -> None:
        shared = self.state.setdefault("shared", {"steps": 0})
        shared["steps"] += 1
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(1 - 0.01 * shared["steps"])


def with_entry(entry: Any) -> type[Homemade]:
    return type("Homemade", (Homemade,), {"entry": entry})


T = torch.optim
KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    **{name: lambda p, name=name: getattr(T, name)(p, lr=0.01) for name in ("Adagrad", "Adafactor", "LBFGS", "NAdam")},
    **{str(entry): with_entry(entry) for entry in ("m", "exp.avg", 0, "master", ("m", 1), "")},
    **{kind.__name__: kind for kind in (Nested, Narrow, Shared, OfNoParameter)},
    "SGD": lambda p: T.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: T.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "amsgrad": lambda p: T.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "tensor lr": lambda p: T.AdamW(p, lr=torch.tensor(0.01)),
    "groups": lambda p: T.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "betas": (0.5, 0.9)}]),
    "masters": lambda p: Optimizer(T.SGD(p, lr=0.01, momentum=0.9), max_norm=0.1, master_weights=True),
    "masters, fused": lambda p: Optimizer(T.AdamW(p, lr=0.01, fused=True), max_norm=0.1, master_weights=True),
}


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """With buffers, and random numbers."""
    torch.manual_seed(0)
    random = nn.BatchNorm1d(4, affine=False), nn.Dropout(0.1)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), *random), nn.Linear(4, 2)).to(dtype)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(module[0].weight.dtype)

        def closure(data: Tensor = data) -> Tensor:
            optimizer.zero_grad()
            loss = module(data).square().sum()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure) if isinstance(optimizer, T.LBFGS) else optimizer.step()
    return copy.deepcopy(module.state_dict())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (kind, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for kind in KINDS
        if dtype.itemsize > 2 or "masters" in kind
    ],
)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    module = model(dtype)
    optimizer = KINDS[kind](list(module.parameters()))
    train(module, optimizer, range(3))
    checkpoint.save(tmp_path, 3, module, optimizer)
    expected = train(module, optimizer, range(3, 7))
    again = model(dtype)
    other = KINDS[kind](list(again.parameters()))
    other.param_groups[0]["lr"] *= 2
    checkpoint.load(tmp_path, again, other)
    torch.testing.assert_close(train(again, other, range(3, 7)), expected, rtol=0, atol=0)


class SharedInside(Homemade):
    """One tensor in lists of the state of all parameters."""

    def update(self, parameter: Tensor, state: dict[Any, Any]) -> None:
        state["scale"] = self.state[self.param_groups[0]["params"][0]].setdefault("scale", [torch.ones(())])
        state["scale"][0] += 1


class Opaque(Homemade):
    def update(self, parameter: Tensor, state: dict[Any, Any]) -> None:
        state["who"] = Path("somewhere")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (SharedInside, r"the state of '0.bias' has a tensor in 'scale' that is elsewhere in it, too"),
        (Opaque, r"the optimizer's state of '0.weight'\['who'\] must be a number, .*; got PosixPath"),
    ],
)
def test_what_could_not_go_on_is_refused_when_it_is_saved(tmp_path: Path, kind: Any, message: str) -> None:
    module = model()
    optimizer = kind(module.parameters())
    train(module, optimizer, range(1))
    with pytest.raises((TypeError, ValueError), match=message):
        checkpoint.save(tmp_path, 1, module, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (None, T.AdamW, "no state of an optimizer for '0.weight', '0.bias', '2.weight', '2.bias'; load it without"),
        (
            lambda p: T.AdamW(p[:2]),
            T.AdamW,
            "no state of an optimizer for '2.weight', '2.bias'; .* add others after",
        ),
        (KINDS["groups"], T.AdamW, "'0.weight' and '0.bias' are in one parameter group, and were saved with different"),
        (KINDS["LBFGS"], lambda p, lr: T.LBFGS(p[:2]), "LBFGS keeps one vector of all its parameters"),
        (KINDS["SGD"], T.AdamW, "it holds the state of SGD, and the optimizer is AdamW; load it with that kind"),
        (T.Adamax, T.AdamW, "it holds the state of Adamax, and the optimizer is AdamW"),
        (T.AdamW, T.SGD, "it holds the state of AdamW, and the optimizer is SGD"),
    ],
)
def test_what_an_optimizer_cannot_take_is_refused(tmp_path: Path, saved: Any, loaded: Any, message: str) -> None:
    module, again = model(), model()
    optimizer = None if saved is None else saved(list(module.parameters()))
    train(module, optimizer or T.SGD(module.parameters()), range(1))
    checkpoint.save(tmp_path, 1, module, optimizer)
    other = loaded(list(again.parameters()), lr=0.5)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path, again, other)
    assert not other.state
    torch.testing.assert_close(again.state_dict(), model().state_dict(), rtol=0, atol=0)  # nothing is loaded


def test_a_class_takes_the_state_of_one_that_it_inherits_from(tmp_path: Path) -> None:
    module, again = model(), model()
    adam, adamw = T.Adam(module.parameters()), T.AdamW(again.parameters())
    train(module, adam, range(2))
    checkpoint.save(tmp_path, 1, module, adam)
    checkpoint.load(tmp_path, again, adamw)
    train(again, adamw, range(1))
    assert adamw.state[again[0].weight]["step"] == 3


def saved_on_two(folder: Path, alike: bool) -> dict[str, int]:
    """Saves with a count beside the parameters on each rank; the count after it was changed, and loaded again."""
    rank = dist.get_rank()
    module = nn.Sequential()
    module.add_module(f"layer{rank}", nn.Linear(2, 2))
    optimizer = OfNoParameter(module.parameters())
    optimizer.state["shared"] = {"steps": 5 if alike else 5 + rank}
    checkpoint.save(folder, 1, {rank: module}, optimizer)
    optimizer.state["shared"] = {"steps": 0}
    checkpoint.load(folder, {rank: module}, optimizer)
    return optimizer.state["shared"]


@pytest.mark.dist
@pytest.mark.parametrize("alike", [True, False])
def test_state_of_no_parameter_comes_back_to_its_rank_or_to_all(two_ranks: Any, tmp_path: Path, alike: bool) -> None:
    assert two_ranks.run(saved_on_two, tmp_path, alike) == [{"steps": 5}, {"steps": 5 if alike else 6}]
    whole = nn.Sequential()
    for rank in range(2):
        whole.add_module(f"layer{rank}", nn.Linear(2, 2))
    optimizer = OfNoParameter(whole.parameters())
    if alike:
        checkpoint.load(tmp_path, whole, optimizer)
        assert optimizer.state["shared"] == {"steps": 5}
    else:
        with pytest.raises(ValueError, match=r"each of the 2 ranks that saved it has its own state .*; got 1"):
            checkpoint.load(tmp_path, whole, optimizer)


# ---- fp32 masters, with other stages


def build_small(name: str) -> tuple[dict[int, nn.Sequential], Pipeline, Optimizer]:
    schedule = getattr(schedules, name)(2, MICROBATCHES)
    mine = {chunk: module.bfloat16() for chunk, module in chunks(schedule.placement, dist.get_rank()).items()}
    pipe = Pipeline(list(mine.values()), schedule, lambda y, target: (y.float() - target).square().mean(), timeout=60)
    parameters = [p for module in mine.values() for p in module.parameters()]
    return mine, pipe, Optimizer(torch.optim.AdamW(parameters, lr=0.01), pipe, max_norm=0.15, master_weights=True)


def small_on_two(folder: Path, name: str, save: bool) -> dict[str, Any]:
    modules, pipe, optimizer = build_small(name)
    with pipe:
        train_in(pipe, optimizer, range(3) if save else range(20, 21), torch.bfloat16)
        checkpoint.save(folder, 3, pipe, optimizer) if save else checkpoint.load(folder, pipe, optimizer)
        return state_by_name(list(modules.values()), optimizer)


@pytest.mark.dist
def test_masters_load_with_other_stages(two_ranks: Any, tmp_path: Path) -> None:
    saved = two_ranks.run(small_on_two, tmp_path, "zb_h1", True)
    expected = {**saved[0], **saved[1]}
    assert expected["layer0.0.weight/master"].dtype == torch.float32
    assert torch.equal(expected["layer0.0.weight/master"].bfloat16(), expected["layer0.0.weight"])
    keys = dcp.FileSystemReader(checkpoint.latest(tmp_path)).read_metadata().state_dict_metadata
    assert {key for key in keys if "master" in key} == {
        f"master.{name}" for name, _ in layers(0, LAYERS).named_parameters()
    }
    loaded = two_ranks.run(small_on_two, tmp_path, "zb_v", False)
    assert_same({**loaded[0], **loaded[1]}, expected)
    whole = layers(0, LAYERS).bfloat16()
    optimizer = Optimizer(torch.optim.AdamW(whole.parameters()), master_weights=True)
    checkpoint.load(tmp_path, whole, optimizer)
    assert_same(state_by_name([whole], optimizer), expected)


@pytest.mark.slow  # imports it
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_states_of_bitsandbytes_go_on(tmp_path: Path, name: str) -> None:
    """All parameters have one table of what the codes of their states mean."""
    kind = getattr(pytest.importorskip("bitsandbytes.optim", reason="pip install bitsandbytes"), name)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 2048), nn.Tanh(), nn.Linear(2048, 2))
        return module, kind(module.parameters(), lr=0.01)

    module, optimizer = made()
    train(module, optimizer, range(3))
    checkpoint.save(tmp_path, 3, module, optimizer)
    expected = train(module, optimizer, range(3, 6))
    again, other = made()
    checkpoint.load(tmp_path, again, other)
    tables = {id(state["qmap1"]) for state in other.state.values() if "qmap1" in state}
    assert len(tables) == 1
    torch.testing.assert_close(train(again, other, range(3, 6)), expected, rtol=0, atol=0)


class Halved(Homemade):
    """State in a subclass of tensors that holds two others, as codes and scales, and cannot be cut."""

    def update(self, parameter: Tensor, state: dict[Any, Any]) -> None:
        moment = state.get("m")
        a, b = (0, 0) if moment is None else (moment.a, moment.b)
        state["m"] = TwoTensor(a * 0.9 + parameter.grad, b + parameter.grad.sign())
        parameter.sub_(state["m"].a * 0.1 + state["m"].b * 0.01)


def test_state_in_codes_and_scales_goes_on_bit_for_bit(tmp_path: Path) -> None:
    module = model()
    optimizer = Halved(module.parameters())
    train(module, optimizer, range(3))
    again = model()
    other = Halved(again.parameters())
    with torch.serialization.safe_globals([TwoTensor]):  # as torchao does for its own
        checkpoint.save(tmp_path, 3, module, optimizer)
        expected = train(module, optimizer, range(3, 7))
        checkpoint.load(tmp_path, again, other)
    torch.testing.assert_close(train(again, other, range(3, 7)), expected, rtol=0, atol=0)


def save_a_shard(folder: Path) -> None:
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters())
    mesh = init_device_mesh("cpu", (2,))
    part = DTensor.from_local(TwoTensor(torch.ones(2, 4), torch.ones(2, 4)), mesh, [Shard(0)], run_check=False)
    optimizer.state[module.weight] = {"m": part}
    with pytest.raises(Exception, match=r"state 'm' of '.\.weight' is a shard .* of TwoTensor, whose scales"):
        checkpoint.save(folder, 1, {dist.get_rank(): module}, optimizer, rename=lambda chunk, key: f"{chunk}.{key}")


@pytest.mark.dist
def test_shards_in_codes_and_scales_are_refused_when_they_are_saved(two_ranks: Any, tmp_path: Path) -> None:
    two_ranks.run(save_a_shard, tmp_path)


@pytest.mark.slow  # imports it
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_states_of_torchao_go_on_with_any_number_of_ranks(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 2, 4 and 1 ranks in turn, saved and loaded in between."""
    kind = getattr(pytest.importorskip("torchao.optim", reason="pip install torchao"), name)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao's would take a minute

    def of_rank(transport: LocalTransport, folder: Path, steps: range) -> dict[str, Tensor]:
        torch.manual_seed(0)
        share = 4 // transport.size
        every = [(f"layer{n}", nn.Linear(64, 64)) for n in range(4)]  # large enough to be quantised
        chunk = nn.Sequential(OrderedDict(every[transport.rank * share : (transport.rank + 1) * share]))
        with Pipeline([chunk], schedules.one_f_one_b(transport.size, 4), nn.functional.mse_loss, transport) as pipe:
            optimizer = Optimizer(kind(chunk.parameters(), lr=0.01), pipe)
            checkpoint.load(folder, pipe, optimizer)
            for step in steps:
                for key, parameter in chunk.named_parameters():
                    generator = torch.Generator().manual_seed(step + 100 * int(key[5]))
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                optimizer.step()
            checkpoint.save(folder, steps.stop, pipe, optimizer)
        return dict(chunk.state_dict())

    (expected,) = results_on_threads(1, lambda transport: of_rank(transport, tmp_path / "one", range(9)))
    for ranks, first in ((2, 0), (4, 3), (1, 6)):
        steps = range(first, first + 3)
        found = results_on_threads(ranks, lambda t, steps=steps: of_rank(t, tmp_path / "several", steps))
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0)
