"""What is read off a torch optimizer: its parameters, its settings, the kind of its state; copies of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zbkern.pipeline.transport.tensors import local_part

MASTERS = "masters_of_pipeline"  # an attribute of the torch optimizer: its parameters below fp32, with fp32 masters


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All parameters of an optimizer, in its order."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def check_whole(caller: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError where it holds other optimizers with states of their own, which nobody would save or put back.

    Not where its `transient_attributes` say that no step depends on them.
    """
    left_out = {"state", "param_groups", *getattr(optimizer, "transient_attributes", ())}
    for name, other in _optimizers_in({name: value for name, value in vars(optimizer).items() if name not in left_out}):
        if other is not optimizer and other.state is not optimizer.state:
            raise TypeError(
                f"{caller}: {type(optimizer).__name__} holds another optimizer, {type(other).__name__} in {name}, "
                "whose state is not in its own: no checkpoint would have it, and no step could be taken back; give all "
                "that it holds to Optimizer([(first, max_norm), (second, max_norm)], pipe), which drives several, or "
                "use an optimizer that keeps the state of all its parameters in `state`"
            )


def _optimizers_in(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Those in an attribute: itself, or in lists, dicts and plain objects there; with the names that lead to them."""
    if isinstance(value, torch.optim.Optimizer):
        yield name, value
    elif depth < 4 and not isinstance(value, (Tensor, torch.nn.Module)) and not callable(value):
        items: Iterable[tuple[str, Any]] = ()
        if isinstance(value, (list, tuple, set)):
            items = ((f"{name}[{index}]", each) for index, each in enumerate(value))
        elif isinstance(value, dict):
            items = ((f"{name}[{key!r}]" if name else key, each) for key, each in value.items())
        elif hasattr(value, "__dict__"):
            items = ((f"{name}.{key}", each) for key, each in vars(value).items())
        for below, each in items:
            yield from _optimizers_in(each, below, depth + 1)


def kinds_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of its class and of the optimizers that this one inherits from, by which states are told apart."""
    classes = [kind for kind in type(optimizer).__mro__ if issubclass(kind, torch.optim.Optimizer)]
    return [kind.__name__ for kind in classes if kind is not torch.optim.Optimizer]


def same_kind(optimizer: torch.optim.Optimizer, kinds: Sequence[str]) -> bool:
    """Whether it can take the state of an optimizer of these `kinds_of`: a subclass that of torch's, say."""
    return not set(kinds_of(optimizer)).isdisjoint(kinds)


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each parameter group says besides its parameters, as it is now."""
    return [
        {name: copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def copied(value: Any) -> Any:
    """A copy of nested lists, tuples and dicts, with copies of tensors in them."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def equal(a: Any, b: Any) -> bool:
    """Whether settings are equal: nested lists, tuples and dicts, with tensors in them."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if type(a) is dict and type(b) is dict:
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if type(a) in (list, tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def is_composite(tensor: Tensor) -> bool:
    """Whether it is of a subclass that holds other tensors, such as the codes and scales of a quantised state."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def plain_parts(tensor: Any) -> list[Tensor]:
    """The tensors that a composite one holds; of others itself."""
    if not is_composite(tensor):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in plain_parts(getattr(tensor, name))]


def is_view(tensor: Any) -> bool:
    """Whether its memory, of a shard (DTensor) that of its part here, is another tensor's, or a piece of it."""
    local = getattr(tensor, "_local_tensor", tensor)  # not to_local(), which may make a view
    return local._base is not None or local.untyped_storage().nbytes() > local.nbytes


@torch.no_grad()
def move_(tensors: Iterable[Any], device: torch.device) -> list[tuple[Tensor, torch.device]]:
    """Moves the memory of tensors, which stay the objects that they are; returns each with the device where it was.

    Of shards (DTensor) the part that is here is moved, and returned.
    """
    moved = []
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        moved.append((local, local.device))
        local.data = local.detach().to(device, copy=True)
    return moved


@torch.no_grad()
def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, of any dtype; of shards (DTensor) the part that is here.

    One kernel per device and dtype: a counter on the CPU would put the whole list on the slow path.
    """
    kinds: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        lists = kinds.setdefault((target.device, target.dtype), ([], []))
        lists[0].append(local_part(target))
        lists[1].append(local_part(source))
    for target_list, source_list in kinds.values():
        torch._foreach_copy_(target_list, source_list)
