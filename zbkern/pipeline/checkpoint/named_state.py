"""The state of a model and its optimizer by the names of the whole model, which do not depend on who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.checkpoint.dcp_format import Stored
from zbkern.pipeline.checkpoint.packed import digest, pack, unpack
from zbkern.pipeline.optimizer.params import (
    check_whole,
    equal,
    hyperparameters,
    is_composite,
    kinds_of,
    parameters,
    same_kind,
)
from zbkern.pipeline.optimizer.post_validation import Optimizer
from zbkern.pipeline.optimizer.step_boundary import StepBoundary, boundaries_of
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.transport.tensors import tensors_in
from zbkern.schedules.units import some

Modules = Pipeline | Mapping[int, nn.Module] | nn.Module
Rename = Callable[[int, str], str]


class NamedState:
    """This rank's modules and optimizer as a flat dict of tensors, and back. Keys:

        model.NAME                parameters and buffers
        master.NAME               fp32 master weights of an Optimizer
        optimizer.ENTRY.NAME      the optimizer's state of a parameter, where it is a tensor and ENTRY has no dot
        values.NAME               all other entries of a parameter, packed; also tensors in codes and scales
        others.RANK               the optimizer's state that is of no parameter; others.RANK.1 that of the second
                                  torch optimizer of several
        shared.RANK               the entries of the optimizer's state that are one tensor
        group.RANK.INDEX          hyperparameters, the names of the parameters that have them, the kind of optimizer

    modules: a Pipeline, {chunk number: module}, or the whole model. optimizer: an Optimizer, a torch optimizer or None.
    rename: (chunk number, key in its module) -> name in the whole model. rank: this one's, of `size`. Raises TypeError
    for another optimizer, ValueError when two tensors of a chunk get one name, or a parameter of the optimizer is in no
    module.
    """

    def __init__(
        self, modules: Modules, optimizer: torch.optim.Optimizer | None, rename: Rename | None, rank: int, size: int
    ) -> None:
        self.rank, self.size = rank, size
        self._chunks = _chunks(modules)
        self._rename = rename
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"checkpoint: optimizer must be an Optimizer, a torch optimizer or None; got {type(optimizer).__name__}"
            )
        self._optimizers = (
            optimizer.optimizers if isinstance(optimizer, Optimizer) else [optimizer] if optimizer else []
        )
        self._masters = optimizer.masters if isinstance(optimizer, Optimizer) else []
        for each in self._optimizers:
            check_whole("checkpoint", each)
        names: dict[int, list[str]] = {}  # of parameters, by id; a tied one has several
        for chunk, module in self._chunks.items():
            for key, value in module.named_parameters(remove_duplicate=False):
                names.setdefault(id(value), []).append(self._name(chunk, key))
        tied = modules.tied if isinstance(modules, Pipeline) else {}
        labels = {key: several[0] for key, several in names.items() if len(several) > 1}
        labels |= {id(parameter): f"tied {label}" for label, parameter in tied.items()}
        self._labels = {name: label for key, label in labels.items() for name in names.get(key, [])}
        names.update({id(master): names[id(p)] for p, master in self._masters if id(p) in names})
        self._names = names
        self._as_saved: set[str] = set()  # whose optimizer state is of the dtypes that it had then
        self._own: dict[str, Tensor] = {}  # the optimizers' parameters, in their order
        for each in self._optimizers:
            for parameter in parameters(each):
                if id(parameter) not in names:
                    raise ValueError(
                        f"checkpoint: a parameter of the optimizer, of shape {list(parameter.shape)}, is in none of "
                        "the modules; pass all modules of this rank"
                    )
                self._own.update(dict.fromkeys(names[id(parameter)], parameter))

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return next((p.device for module in self._chunks.values() for p in module.parameters()), torch.device("cpu"))

    def boundaries(self) -> list[StepBoundary]:
        """The step boundaries of these modules, which say whether their last optimizer steps are over."""
        return boundaries_of(self._chunks.values())

    def tensors(self) -> dict[str, Tensor]:
        """Everything of this rank; parameters and states are the tensors themselves, not copies."""
        entries = self._entries()
        tensors = {f"model.{name}": v if isinstance(v, Tensor) else pack(v, name) for _, _, name, v in entries}
        states = {key: state for each in self._optimizers for key, state in each.state.items()}
        if shared := self._shared(states):
            tensors[f"shared.{self.rank}"] = pack(shared, "shared state")
        for name, parameter in self._own.items():
            state = states.get(parameter)
            if state is None:
                continue
            values = {}
            for entry, value in state.items():
                _check_shard(name, entry, value)
                if _is_tensor_entry(entry, value):
                    tensors[f"optimizer.{entry}.{name}"] = value
                else:
                    values[entry] = value
            if values or not state:
                tensors[f"values.{name}"] = pack(values, f"the optimizer's state of {name!r}")
        for place, each in enumerate(self._optimizers):
            others = {key: value for key, value in each.state.items() if not isinstance(key, Tensor)}
            if others:
                tensors[_key_of_others(self.rank, place)] = pack(others, "the optimizer's state")
        tensors.update({f"master.{name}": master for _, master in self._masters for name in self._names[id(master)]})
        settings = [
            (kinds_of(each), *both)
            for each in self._optimizers
            for both in zip(each.param_groups, hyperparameters(each), strict=True)
        ]
        for index, (kinds, group, values) in enumerate(settings):
            names = [name for parameter in group["params"] for name in self._names[id(parameter)]]
            described = {"names": names, "values": values, "kinds": kinds}
            tensors[f"group.{self.rank}.{index}"] = pack(described, "param_groups")
        return tensors

    def _shared(self, states: Mapping[Any, Any]) -> list[list[tuple[str, str]]]:
        """Where each tensor is that several entries of the optimizer's state are, as (name, entry): a table, say.

        Raises ValueError for one that is inside of an entry: it would be loaded as two.
        """
        places: dict[int, list[tuple[str, Any]]] = {}
        inside: set[int] = set()
        for key, entries in states.items():
            for entry, value in entries.items() if isinstance(entries, dict) else [(None, entries)]:
                for leaf in tensors_in(value):
                    places.setdefault(id(leaf), []).append((self._names.get(id(key), [key])[0], entry))
                    if leaf is not value or not _is_tensor_entry(entry, value) or not isinstance(key, Tensor):
                        inside.add(id(leaf))
        for key, several in places.items():
            if len(several) > 1 and key in inside:
                raise ValueError(
                    f"checkpoint.save: the state of {several[1][0]!r} has a tensor in {several[1][1]!r} that is "
                    "elsewhere in it, too: loaded, they would be two"
                )
        return [several for several in places.values() if len(several) > 1]

    def _share(self, places: Sequence[tuple[str, str]]) -> None:
        """Makes equal tensors one again that were one when they were saved."""
        states = {key: state for each in self._optimizers for key, state in each.state.items()}
        here = [(states[self._own[name]], entry) for name, entry in places if name in self._own]
        for state, entry in here[1:]:
            if torch.equal(state[entry], first := here[0][0][here[0][1]]):
                state[entry] = first

    def targets(self, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
        """What to load into.

        The model's own tensors, a tied one under its first name, and new ones for the optimizer. Groups are read from
        all ranks: those of this rank's parameters may have been anywhere. Raises ValueError when the model has a tensor
        that is not stored so.
        """
        targets: dict[str, Tensor] = {}
        for _, _, name, value in self._entries():
            key = f"model.{name}"
            if key not in stored:
                raise ValueError(f"checkpoint: {name!r} is not in it; saved were {some(names_of_model(stored))}")
            is_tensor = isinstance(value, Tensor)
            if is_tensor and [*stored[key].size] != [*value.shape]:
                raise ValueError(
                    f"checkpoint: {name!r} is {list(value.shape)} here and {[*stored[key].size]} in it; load it into "
                    "the model that was saved"
                )
            targets[key] = value if is_tensor else stored[key].empty()  # what is packed, as long as it was then
        for names in self._names.values():
            for name in names[1:]:
                targets.pop(f"model.{name}", None)
        for key, what in stored.items() if self._optimizers else ():
            kind, name = _parse(key)
            if name in self._own and name != self._names[id(self._own[name])][0]:
                continue  # another name of a tied parameter
            if kind == "optimizer" and name in self._own and [*what.size] == [*self._own[name].shape]:
                like = self._own[name]  # a shard where the parameter is one
                targets[key] = torch.empty_like(like, dtype=getattr(torch, what.dtype), requires_grad=False)
            elif kind in ("group", "others", "shared") or (kind in ("optimizer", "values") and name in self._own):
                targets[key] = what.empty()
        masters = {id(master) for _, master in self._masters}
        for name, parameter in self._own.items():
            key, has_master = f"model.{name}", id(parameter) in masters
            same = key in targets and str(targets[key].dtype) == f"torch.{stored[key].dtype}"
            if same and has_master == (f"master.{name}" in stored):
                self._as_saved.add(name)
        for _, master in self._masters:
            if (key := f"master.{self._names[id(master)][0]}") in stored:
                targets[key] = torch.empty_like(master)
        return targets

    def names(self) -> list[tuple[str, int, str]]:
        """(name, chunk, label) of this rank's part of the model. Names of one parameter have one label, others have "".

        Raises ValueError where two tensors of a chunk have one name.
        """
        keys: dict[tuple[int, str], str] = {}
        for chunk, key, name, _ in self._entries():
            if (other := keys.setdefault((chunk, name), key)) != key:
                raise ValueError(
                    f"checkpoint: rename gives {other!r} and {key!r} of chunk {chunk} one name, {name!r}, and the "
                    "whole model needs a name for each"
                )
        return [(name, chunk, self._labels.get(name, "")) for chunk, name in keys]

    def holds(self) -> str:
        """A digest of what this rank has of the model."""
        return digest(sorted(name for name, _, _ in self.names()))

    def check(self, loaded: Mapping[str, Tensor], ranks: int) -> None:
        """Raises ValueError where the optimizer cannot take the state: of another kind, of other parameters or
        groups, or of as many others as ranks.

        ranks: how many have saved.
        """
        groups = [unpack(value) for key, value in loaded.items() if _parse(key)[0] == "group"]
        for each in self._optimizers:
            names = {name for parameter in parameters(each) for name in self._names[id(parameter)]}
            other = next(
                (g for g in groups if not names.isdisjoint(g["names"]) and not same_kind(each, g["kinds"])), None
            )
            if other is not None:
                raise ValueError(
                    f"checkpoint.load: it holds the state of {other['kinds'][0]}, and the optimizer is "
                    f"{type(each).__name__}; load it with that kind, or without optimizer= for the model alone"
                )
        is_one_vector = any(isinstance(each, torch.optim.LBFGS) for each in self._optimizers)
        if is_one_vector and [*self._own] not in [group["names"] for group in groups]:
            raise ValueError(
                "checkpoint.load: LBFGS keeps one vector of all its parameters, and others were saved; load it with "
                "the same parameters on each rank, or without optimizer= for the model alone"
            )
        self._settings = self._settings_in(groups)
        self._others = [self._others_in(loaded, ranks, place) for place in range(len(self._optimizers))]

    def take(self, loaded: Mapping[str, Tensor]) -> None:
        """Puts what `targets` made, and somebody has filled, into modules and torch optimizers."""
        for chunk, module in self._chunks.items():
            entries = {}
            for key, value in module.state_dict().items():
                tensor = loaded.get(f"model.{self._name(chunk, key)}", value)  # itself: loaded under its first name
                entries[key] = tensor if isinstance(value, Tensor) else unpack(tensor)
            module.load_state_dict(entries)
        states: dict[int, dict[Any, Any]] = {id(parameter): {} for parameter in self._own.values()}
        for key, value in loaded.items():
            kind, name = _parse(key)
            if kind == "optimizer":
                states[id(self._own[name])][key.split(".")[1]] = value
            elif kind == "values":
                states[id(self._own[name])].update(unpack(value))
        every_setting = iter(self._settings)
        for optimizer, others in zip(self._optimizers, self._others, strict=True):
            in_order = [*parameters(optimizer)]
            state = {index: states[id(parameter)] for index, parameter in enumerate(in_order)}
            groups = optimizer.state_dict()["param_groups"]
            for group, described in zip(optimizer.param_groups, groups, strict=True):
                settings = next(every_setting)
                described.update({name: _where(group.get(name), value) for name, value in settings.items()})
            optimizer.load_state_dict({"state": {**state, **others}, "param_groups": groups})
            for index, parameter in enumerate(in_order):
                if self._names[id(parameter)][0] in self._as_saved:
                    _set_exactly(optimizer.state.get(parameter, {}), state[index], parameter.device)
        for key, value in loaded.items():
            for places in unpack(value) if _parse(key)[0] == "shared" else ():
                self._share(places)
        with torch.no_grad():
            for parameter, master in self._masters:
                master.copy_(loaded.get(f"master.{self._names[id(master)][0]}", parameter))

    def _settings_in(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The hyperparameters of every group of this optimizer, none of an empty one. groups: those of all ranks."""
        saved = {name: group["values"] for group in groups for name in group["names"]}
        by_group: list[dict[str, Any]] = []
        for group in (group for each in self._optimizers for group in each.param_groups):
            names = [self._names[id(parameter)] for parameter in group["params"]]
            if missing := [of_one[0] for of_one in names if saved.keys().isdisjoint(of_one)]:
                raise ValueError(
                    f"checkpoint.load: it holds no state of an optimizer for {some(missing)}; load it without "
                    "optimizer= for the model alone, or with the parameters that were saved, and add others after it"
                )
            settings = [next(saved[name] for name in of_one if name in saved) for of_one in names]
            for of_one, of_other in zip(names, settings, strict=True):
                if not equal(of_other, settings[0]):
                    raise ValueError(
                        f"checkpoint.load: {names[0][0]!r} and {of_one[0]!r} are in one parameter group, and were "
                        f"saved with different settings, {settings[0]} and {of_other}; group them as they were"
                    )
            by_group.append(settings[0] if settings else {})
        return by_group

    def _others_in(self, loaded: Mapping[str, Tensor], ranks: int, place: int) -> dict[Any, Any]:
        """An optimizer's state that is of no parameter: what all ranks have alike, or this rank's own."""
        keys = [_key_of_others(rank, place) for rank in range(ranks)]
        packed = {key: loaded[key] for key in keys if key in loaded}
        first = next(iter(packed.values()), None)
        local = packed.get(_key_of_others(self.rank, place))
        if first is None or (local is None and ranks == self.size):
            return {}
        if len(packed) == ranks and all(torch.equal(value, first) for value in packed.values()):
            return unpack(first)
        if local is None or ranks != self.size:
            name = type(self._optimizers[place]).__name__
            raise ValueError(
                f"checkpoint.load: the {name} of each of the {ranks} ranks that saved it has its "
                f"own state that is of no parameter; load it with as many ranks; got {self.size}"
            )
        return unpack(local)

    def _name(self, chunk: int, key: str) -> str:
        """The name of a chunk's key in the whole model."""
        name = key if self._rename is None else self._rename(chunk, key)
        if not isinstance(name, str):
            raise TypeError(f"checkpoint: rename must return a string, a name in the whole model; got {name!r}")
        return name

    def _entries(self) -> Iterator[tuple[int, str, str, Any]]:
        """(chunk, key, name in the whole model, value) of all that the modules' state dicts have."""
        for chunk, module in self._chunks.items():
            for key, value in module.state_dict().items():
                yield chunk, key, self._name(chunk, key), value


def check_unique(names: Iterable[tuple[str, int, str]]) -> None:
    """Raises ValueError where chunks share a name; names: `NamedState.names` of all ranks.

    Tensors of one name would become one in the checkpoint; for a tied parameter that is right.
    """
    seen: dict[str, int] = {}
    for name, chunk, label in names:
        if seen.setdefault(name, chunk) != chunk and not label.startswith("tied "):
            raise ValueError(
                f"checkpoint: chunks {seen[name]} and {chunk} both have a tensor {name!r}, and the whole model "
                "needs a name for each; pass rename=function(chunk, key), such as "
                'rename=lambda chunk, key: f"chunks.{chunk}.{key}"'
            )


def _is_tensor_entry(entry: Any, value: Any) -> bool:
    """Whether an entry of an optimizer's state is stored as a tensor of its own."""
    return isinstance(value, Tensor) and type(entry) is str and "." not in entry and not is_composite(value)


def _check_shard(name: str, entry: Any, value: Any) -> None:
    """Raises ValueError for a shard of codes and scales, of which another division could not be read."""
    if isinstance(value, DTensor) and is_composite(value.to_local()):
        raise ValueError(
            f"checkpoint.save: the optimizer's state {entry!r} of {name!r} is a shard (DTensor) of "
            f"{type(value.to_local()).__name__}, whose scales are of blocks that other shards do not have; use an "
            "optimizer whose state is in 16 or 32 bits under fully_shard, or save without optimizer= the model alone"
        )


def _set_exactly(present: dict[Any, Any], saved: dict[Any, Any], device: torch.device) -> None:
    """Undoes what torch's load_state_dict has converted: dtypes, and strings."""
    for entry, value in saved.items():
        made = present.get(entry)
        if isinstance(value, Tensor) and isinstance(made, Tensor):
            present[entry] = made if made.dtype == value.dtype else value.to(made.device)
        elif type(made) is type(value):
            present[entry] = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), value)


def _where(present: Any, loaded: Any) -> Any:
    """A hyperparameter that is a tensor, on the device where it is now."""
    return loaded.to(present.device) if isinstance(present, Tensor) and isinstance(loaded, Tensor) else loaded


def _chunks(modules: Modules) -> Mapping[int, nn.Module]:
    if isinstance(modules, nn.Module):
        return {0: modules}
    if isinstance(modules, Pipeline):
        return modules.modules
    return modules


def _parse(key: str) -> tuple[str, str]:
    """(kind, NAME) of a key; NAME is empty for kinds that have none."""
    kind, _, rest = key.partition(".")
    return kind, rest if kind in ("model", "master", "values") else rest.partition(".")[2] * (kind == "optimizer")


def _key_of_others(rank: int, place: int) -> str:
    return f"others.{rank}" + f".{place}" * (place > 0)


def is_of_model(key: str) -> bool:
    """Whether it is a tensor of the model, which loading changes in place."""
    return _parse(key)[0] == "model"


def names_of_model(stored: Iterable[str]) -> list[str]:
    """The names of the model's tensors that are stored."""
    return [name for kind, name in map(_parse, stored) if kind == "model"]
