"""A chunk of a model: the model's own forward, with stand-ins for the layers that other ranks hold.

Whatever a forward does besides its layers (positions, masks, rotary embeddings) it does in every chunk. The layer
before the chunk's first gives what was received, the layer after its last ends the forward, and those before compute
nothing: they give NaN, so that a model that uses more of them than the last one's output cannot go wrong in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zbkern.pipeline.models.layers import is_transformer


class _NotHere:
    """The model's first argument on a rank that does not have it: stand-ins take it, and nothing else can use it."""

    def __init__(self, name: str | None) -> None:
        self.__dict__["name"] = name

    def _refuse(self, *others: Any) -> Any:
        name = self.__dict__["name"]
        raise ValueError(
            f"cut: the model's forward uses its argument {name!r} outside of its first layer, and other chunks do not "
            f"have it: give it as a side input, pipe.step(None, targets, side={{{name!r}: tensor}}), on every rank"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__


_SETTING = bool | int | float | str


_EMBEDDED = ("inputs_embeds", "pixel_values", "input_features", "input_values")  # beginnings of arguments' names


class _Reached(Exception):
    """The layer after the chunk's last was called."""


class Flow:
    """What goes into and out of the layers of a chunk in the forward that runs."""

    def __init__(self) -> None:
        self.kind: type[nn.Module] | None = None  # of the layer whose output is received
        self.traced: dict[str, Tensor] | None = None  # what stand-ins of modules beside the layers have given, by name
        self.begin(None)

    def begin(self, received: Any) -> None:
        self.received, self.sent = received, None
        self.nothing = pytree.tree_map_only(Tensor, _nothing_like, received)
        self.entered = self.left = False

    def no_tensor(self) -> Tensor:
        """NaN in the shape of the first tensor that was received; a single one where nothing was."""
        leaves = pytree.tree_leaves(self.nothing)
        return leaves[0] if leaves and isinstance(leaves[0], Tensor) else torch.tensor(torch.nan)

    def enter(self, name: str) -> Any:
        if self.entered:
            raise ValueError(
                f"cut: layer {name!r} runs more than once in a forward; a pipeline passes each layer once: name what "
                "runs once as layers"
            )
        self.entered = True
        return self.received

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Hook of the chunk's last layer."""
        self.sent, self.left = output, True


class _Absent(nn.Module):
    """A module that another rank holds. It has the settings of the original, such as a block's kind of attention."""

    held_elsewhere = True  # there is nothing in it that could be recomputed

    def __init__(self, original: nn.Module, name: str, flow: Flow) -> None:
        super().__init__()
        self.__dict__.update({key: value for key, value in vars(original).items() if isinstance(value, _SETTING)})
        self._name, self._flow = name, flow
        self._kind = type(original)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__.get("_kind"), name, None)
        if isinstance(value, _SETTING) and not name.startswith("__"):
            return value
        raise AttributeError(
            f"cut: the model's forward uses {name!r} of {self.__dict__.get('_name')!r}, which another chunk holds; if "
            "it does so for want of token ids, give them as a side input, side={'input_ids': tokens}, on every rank"
        )

    def _like(self, inputs: Any, keywords: Any) -> Tensor:
        """NaN in the shape of the first tensor given, or of its embeddings."""
        given = (leaf for leaf in pytree.tree_leaves((inputs, keywords)) if isinstance(leaf, Tensor))
        first = next(given, self._flow.no_tensor())
        shape = (*first.shape, self.embedding_dim) if "embedding_dim" in vars(self) else first.shape
        like = first if first.is_floating_point() else self._flow.no_tensor()
        return torch.full((), torch.nan, dtype=like.dtype, device=first.device).expand(shape)


class Before(_Absent):
    """A layer before the chunk's first. One of the same class gives a tuple where that one does."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if "embedding_dim" in vars(self):
            return self._like(inputs, keywords)
        return self._flow.nothing if self._kind is self._flow.kind else self._flow.no_tensor()


class Entry(_Absent):
    """The layer before the chunk's first: gives what that one gave on its rank."""

    def __init__(self, original: nn.Module, name: str, flow: Flow) -> None:
        super().__init__(original, name, flow)
        flow.kind = type(original)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self._flow.enter(self._name)


class After(_Absent):
    """A layer after the chunk's last."""

    def __getattr__(self, name: str) -> Any:
        if "_flow" in self.__dict__ and self._flow.left:
            raise _Reached  # such as the dtype of the head's weight, to which its input is to be cast
        return super().__getattr__(name)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        raise _Reached


class Outside(_Absent):
    """A module with parameters that belongs to a layer of another chunk, GPT-2's positions, say."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        nothing = self._like(inputs, keywords)
        if self._flow.traced is not None:
            self._flow.traced[self._name] = nothing.requires_grad_()
        return nothing


class Chunk(nn.Module):
    """Layers first to last - 1 of a model, under the names that they have there. `cut` makes them.

    whole: the model, with stand-ins. names: of all layers. shared: {label: name of the parameter here} of what several
    layers share, label being its name in the first of them. elsewhere: {name of what stands beside the layers and has a
    stand-in here: the layer in whose chunk it is}, parameters and modules.
    The first chunk takes what the model takes, any other what the one before returns, and all take keyword arguments
    of the model besides (side inputs). The last returns what the model returns, of the transformers library its logits.
    """

    whole: Any  # the copy of the model

    def __init__(
        self,
        whole: nn.Module,
        flow: Flow,
        names: Sequence[str],
        first: int,
        last: int,
        shared: Mapping[str, str],
        elsewhere: Mapping[str, str],
    ) -> None:
        super().__init__()
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = whole.__dict__[kind]  # one dict for both: names, moves and casts are the model's
        self.__dict__["whole"] = whole  # not as a submodule, which would be in all names
        self.layer_names = names[first:last]
        self.all_layers, self._first, self._last, self.shared = names, first, last, dict(shared)
        self._flow, self._elsewhere = flow, elsewhere
        # DistributedDataParallel would broadcast into stand-ins, which have no memory of their own
        self._ddp_params_and_buffers_to_ignore = list(elsewhere)
        self.tensor_names = frozenset(self.state_dict())  # what is wrapped later has others
        self._checked = False
        if last < len(names):
            whole.get_submodule(names[last - 1]).register_forward_hook(flow.leave)

    @property
    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that several layers hold, by one name for all: a Pipeline sums gradients over their ranks."""
        return {label: self.get_parameter(name) for label, name in self.shared.items()}

    def split_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of a batch by the names of the model's arguments, what the first chunk alone takes: its first argument, such
        as token ids, embeddings and pixels; and what every chunk takes. Labels are the loss function's."""
        own = next(iter(inspect.signature(self.whole.forward).parameters), "")
        here = {name for name in batch if name == own or name.startswith(_EMBEDDED)}
        every = {name: value for name, value in batch.items() if name not in here | {"labels"} and value is not None}
        return {name: batch[name] for name in batch if name in here}, every

    def train(self, mode: bool = True) -> Chunk:
        self.whole.training = mode
        return super().train(mode)

    def forward(self, *inputs: Any, passed: Any = None, **side: Any) -> Any:
        received = passed if passed is not None else inputs[0] if inputs else None
        output = self._own_output(received, inputs, side)
        if not self._checked:
            self._check(received, output, inputs, side)
            self._checked = True
        return output if isinstance(output, Tensor) or self._last == len(self.all_layers) else {"passed": output}

    def _own_output(self, received: Any, inputs: Any, side: dict[str, Any]) -> Any:
        """What the last of the layers gives."""
        self._flow.begin(None if self._first == 0 else received)
        try:
            output = self._run(inputs, side)
        except _Reached:
            output = None
        except Exception as error:
            if isinstance(error, AttributeError) and str(error).startswith("cut: "):
                raise ValueError(str(error)) from error  # of a stand-in
            if self._first > 0 and not str(error).startswith("cut: "):
                if not self._flow.entered:
                    raise self._unreachable(error) from error
                if "NoneType" in str(error) and "input_ids" not in side and is_transformer(self.whole):
                    raise self._without_tokens(error) from error
            raise
        finally:
            sent, left, entered = self._flow.sent, self._flow.left, self._flow.entered
            self._flow.begin(None)
        if self._last < len(self.all_layers):
            if not left:
                before, after = self.all_layers[self._last - 1], self.all_layers[self._last]
                raise ValueError(
                    f"cut: layer {before!r} must run before {after!r}; it did not: name the layers in the order in "
                    "which they run, each called once in every forward"
                )
            output = sent
        elif self._first > 0 and not entered:
            raise ValueError(
                f"cut: layer {self.all_layers[self._first - 1]!r} must be called in every forward; it was not: name "
                "modules that the forward calls"
            )
        else:
            output = _result(output)
        return output

    def _run(self, inputs: Any, side: dict[str, Any]) -> Any:
        transformer = is_transformer(self.whole)
        if transformer:
            side = {"use_cache": False, **side}
        if self._first == 0:
            return self.whole(*inputs, **side)
        if transformer and "input_ids" not in side:
            if self._first == 1:  # the embedding is all that other chunks have done
                return self.whole(inputs_embeds=self._flow.enter(self.all_layers[0]), **side)
            return self.whole(inputs_embeds=self._no_embeddings(), **side)
        own = next(iter(inspect.signature(self.whole.forward).parameters), None)
        return self.whole(**side) if own in side else self.whole(_NotHere(own), **side)

    def _no_embeddings(self) -> Tensor:
        """NaN in the shape of embeddings, which what blocks pass on may have one dimension more than."""
        given = self._flow.no_tensor()
        if given.dim() <= 3:
            return given
        return given.flatten()[:1].expand(*given.shape[:2], self.whole.config.get_text_config().hidden_size)

    def _unreachable(self, error: Exception) -> ValueError:
        return ValueError(
            f"cut: the model's forward fails before {self.all_layers[self._first]!r}, the chunk's first layer: "
            f"{type(error).__name__}: {error}. What it needs there of the batch must be a side input, "
            "pipe.step(inputs, targets, side={name: tensor}), by the name that the forward has for it; what it "
            "computes from layers of other chunks must be in a layer, or the cut elsewhere"
        )

    def _without_tokens(self, error: Exception) -> ValueError:
        return ValueError(
            f"cut: {type(error).__name__} in the layers {self.layer_names[0]!r} to {self.layer_names[-1]!r}: {error}. "
            "They have no token ids; if the model uses these there, give them as a side input, "
            "side={'input_ids': tokens}, on every rank"
        )

    def _check(self, received: Any, output: Any, inputs: Any, side: dict[str, Any]) -> None:
        """Raises ValueError where the output depends on what other chunks hold, which is NaN here."""
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.numel()]
        given = [leaf for leaf in pytree.tree_leaves(received) if isinstance(leaf, Tensor)]
        if any(leaf.isnan().any() for leaf in given) or not any(leaf.isnan().any() for leaf in tensors):
            return
        for name in self._used_from_elsewhere(received, inputs, side) if self._elsewhere else ():
            raise ValueError(
                f"cut: the layers {self.layer_names[0]!r} to {self.layer_names[-1]!r} use {name!r}, which stands "
                f"beside the layers and is in the chunk of {self._elsewhere[name]!r} alone: put it into each layer "
                "that uses it (one in several layers is a tied weight), or cut so that one chunk has all these layers"
            )
        if any(leaf.isnan().all() for leaf in tensors):
            raise ValueError(
                f"cut: the layers {self.layer_names[0]!r} to {self.layer_names[-1]!r} give NaN only: their weights are "
                "not numbers, or the model uses something there that it computes in layers of other chunks, besides "
                "the output of the layer before: cut elsewhere, or make that computation a part of a layer"
            )

    def _used_from_elsewhere(self, received: Any, inputs: Any, side: dict[str, Any]) -> list[str]:
        """The names in `elsewhere` of what the output depends on: by the graph of another forward."""
        gpus = {leaf.device.index for leaf in pytree.tree_leaves((inputs, side)) if _on_gpu(leaf)}
        stand_ins = {name: value for name, value in self.named_buffers() if name in self._elsewhere}
        traced = self._flow.traced = {n: value for n, value in stand_ins.items() if value.is_floating_point()}
        nothing_saved = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)  # by hooks of the caller's
        try:
            with torch.enable_grad(), torch.random.fork_rng([*gpus]), nothing_saved:
                for value in traced.values():
                    value.requires_grad_()
                output = self._own_output(received, inputs, side)
        finally:
            self._flow.traced = None
            for value in stand_ins.values():
                value.requires_grad_(False)
        leaves = _leaves_of_graph(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        return [name for name, value in traced.items() if id(value) in leaves]


def _on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cuda


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _leaves_of_graph(outputs: Iterable[Tensor]) -> set[int]:
    """The ids of the tensors to which a backward from these would give gradients."""
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, leaves = set(waiting), set()
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        more = {edge for edge, _ in node.next_functions if edge is not None} - seen
        seen |= more
        waiting += more
    return leaves


def _nothing_like(tensor: Tensor) -> Tensor:
    value = torch.nan if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _result(output: Any) -> Any:
    """Of an output of the transformers library what a loss takes; others as they are."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    return output
