"""What stands for layers and arguments that other chunks have: what the model's forward finds there, and gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import BackwardHook

from zbkern.pipeline.models.placeholders import Placeholder, placeholder
from zbkern.pipeline.models.skips import Skips
from zbkern.pipeline.transport.tensors import tensors_in

_SETTING = bool | int | float | str
GIVE_TOKENS = "give them as a side input, side={'input_ids': tokens}, on every rank"


class Reached(Exception):
    """The layer after the chunk's last was called."""

    def __init__(self) -> None:
        super().__init__(
            "cut: the model goes on in another chunk: call the chunk, and not its whole; to generate, let one process "
            "read what export writes"
        )


# What a part of a model would do as if it were the whole, and what errors advise.
OF_WHOLE_MODELS = {
    "resize_token_embeddings": "resize the embeddings of the whole model before you cut it",
    "save_pretrained": "call zbkern.pipeline.export(folder, pipe) on every rank",
    "generate": "let one process read what zbkern.pipeline.export writes",
}


def refuse(method: str, *_: Any, **__: Any) -> None:
    """In the place of such a method of a model of which other chunks have parts."""
    raise ValueError(f"cut: {method}: other chunks have parts of the model: {OF_WHOLE_MODELS[method]}")


class Flow:
    """What goes into and out of the layers of a chunk in the forward that runs."""

    def __init__(self) -> None:
        self.kind: type[nn.Module] | None = None  # of the layer whose output is received
        self.first = self.last = ""  # the chunk's first and last layer
        self.argument = ""  # of the first one's forward, for what it goes on with
        self.runs = False  # else a layer runs alone, again in an R, and gives what it gives
        self._backward_hook: BackwardHook | None = None  # of the chunk's last layer
        self.begin(None)

    def begin(self, received: Any, skipped: Mapping[str, Any] | None = None) -> None:
        self.received, self.sent, self.skips = received, None, Skips(skipped)
        self.entered = self.left = False
        self.ended = ""  # by a layer after the last, where the last has not run
        self.has_graph = torch.is_grad_enabled()

    def end(self) -> None:
        self.runs = False

    def like_received(self, name: str) -> Any:
        """Placeholders for what a layer gives that is of the class of the one whose output is received."""
        return pytree.tree_map_only(Tensor, lambda tensor: placeholder(tensor, name), self.received)

    def tensor_like_received(self, name: str) -> Placeholder:
        """A placeholder in the shape of the first tensor that was received; a single number where nothing was."""
        return placeholder(next(iter(tensors_in(self.received)), torch.empty(())), name)

    def enter(self, name: str) -> Any:
        if self.entered:
            raise ValueError(
                f"cut: layer {name!r} runs more than once in a forward; a pipeline passes each layer once: name what "
                "runs once as layers"
            )
        self.entered = True
        self._refuse_reentrant(name, self.received)
        return self.received

    def _refuse_reentrant(self, name: str, given: Any) -> None:
        """Raises ValueError where a layer is called without gradients, and what it is given has one."""
        if self.has_graph and not torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in(given)):
            raise ValueError(
                f"cut: layer {name!r} is called where gradients are off, and the layers before it would get none: in "
                "activation checkpointing set use_reentrant=False; under torch.no_grad give it a detached input"
            )

    def enter_inside(self, module: nn.Module, inputs: Any, keywords: Any) -> Any:
        """Hook before a block of which the chunk has the second half: it is given what was received.

        What it was given, a placeholder or a skip, knows that from then on: activation checkpointing calls again.
        """
        given: Any = inputs[0] if inputs else keywords.get(self.argument)
        is_final = self.entered if self.runs else not hasattr(given, "in_its_place")  # behind `call_inside`
        if torch.compiler.is_compiling() or (is_final and not isinstance(given, Placeholder)):
            return None
        if self.has_graph and not torch.is_grad_enabled():
            raise ValueError(
                f"cut: {self.first!r} begins with its second half here and would get no gradient from activation "
                "checkpointing that builds its graph later: set use_reentrant=False"
            )
        if self.runs:
            given.in_its_place = next(iter(tensors_in(self.enter(self.first))))
        if inputs:
            return (given.in_its_place, *inputs[1:]), keywords
        return inputs, {**keywords, self.argument: given.in_its_place}

    def call_inside(self, module: nn.Module, call: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
        """The same around a call that is compiled, which a placeholder is not for."""
        inputs, keywords = self.enter_inside(module, inputs, keywords) or (inputs, keywords)
        return call(*inputs, **keywords)

    def before_last(self, module: nn.Module, inputs: Any) -> Any:
        """Hook before the chunk's last layer: has its backward hooks called, which torch would put on what stands for
        the output that is sent."""
        full, others = module._get_backward_hooks()
        before, self._backward_hook = module._get_backward_pre_hooks(), None
        if not (self.runs and self.has_graph and (full or others or before)):
            return None
        if others or module._compiled_call_impl is not None:
            self._refuse_backward_hooks(self.last, module)
        self._backward_hook = BackwardHook(module, full, before)
        return self._backward_hook.setup_input_hook(inputs)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Hook of the chunk's last layer. What the forward goes on with cannot change what is sent."""
        if not self.runs:
            return output
        self._refuse_reentrant(self.last, inputs)
        if self._backward_hook is not None:
            output, self._backward_hook = self._backward_hook.setup_output_hook(output), None
        self.sent, self.left = result_of(output), True
        return pytree.tree_map_only(Tensor, lambda tensor: placeholder(tensor, self.last), output)

    def skip(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Hook of a layer whose output layers of later chunks take."""
        if self.runs:
            if self.has_graph and (module._backward_hooks or module._backward_pre_hooks):
                self._refuse_backward_hooks(name, module)
            self.skips.keep(name, output)

    def _refuse_backward_hooks(self, name: str, module: nn.Module) -> None:
        raise ValueError(
            f"cut: layer {name!r}, whose output goes to another chunk, must have no backward hook if it is compiled or "
            "one of skips, and else none but those of register_full_backward_hook and register_full_backward_pre_hook: "
            "torch would not call it; register it on a module inside of the layer, or cut elsewhere"
        )

    def skip_states(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """The same of an encoder, in the chunk of its last layer: the decoder takes its hidden states alone."""
        self.skip(name, module, inputs, output[0])


class _Absent(nn.Module):
    """A module that another rank holds. It has the settings of the original, such as a block's kind of attention."""

    held_elsewhere = True  # there is nothing in it that could be recomputed

    def __init__(self, original: nn.Module, name: str, flow: Flow) -> None:
        super().__init__()
        self.__dict__.update({key: value for key, value in vars(original).items() if isinstance(value, _SETTING)})
        self._name, self._flow = name, flow
        self._kind = type(original)
        # not as submodules, whose names would be in every state dict; a forward may ask for the dtype of their weights
        self.__dict__["_inside"] = {
            **{key: outside(child, f"{name}.{key}", flow) for key, child in original.named_children()},
            **{key: like_parameter(value, name) for key, value in original.named_parameters(recurse=False)},
        }

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_inside", ()):
            return self._inside[name]
        value = getattr(self.__dict__.get("_kind"), name, None)
        if isinstance(value, _SETTING) and not name.startswith("__"):
            return value
        raise AttributeError(
            f"cut: the model's forward uses {name!r} of {self.__dict__.get('_name')!r}, which another chunk holds"
        )

    def _like(self, inputs: Any, keywords: Any) -> Tensor:
        """In the shape of the first tensor given, or of its embeddings; of positions where it gets any."""
        positions = keywords.get("position_ids")  # a mask is longer, in slices
        received = self._flow.tensor_like_received(self._name)
        first = next(iter(tensors_in((positions, inputs, keywords))), None)
        if first is None:  # sinusoids, which take a shape
            return received
        shape = (*first.shape, self.embedding_dim) if "embedding_dim" in vars(self) else first.shape
        dtype = first.dtype if first.is_floating_point() else received.dtype
        return placeholder(torch.empty((), dtype=dtype, device=first.device).expand(shape), self._name)


class Before(_Absent):
    """A layer before the chunk's first. One of the same class gives a tuple where that one does."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if "embedding_dim" in vars(self):
            return self._like(inputs, keywords)
        if self._kind is self._flow.kind:
            return self._flow.like_received(self._name)
        output = self._flow.tensor_like_received(self._name)
        output.may_be_tuple = True
        return output


class Skipped(_Absent):
    """A layer of an earlier chunk whose output this one has received."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self._flow.skips[self._name]


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
            raise Reached  # such as the dtype of the head's weight, to which its input is to be cast
        return super().__getattr__(name)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self._flow.ended = self._name
        raise Reached


class Zeros(_Absent):
    """A part of a block that is in two chunks, in the one that lacks it: it adds nothing.

    outputs: the length of the tuple that it gives, with zeros first; 0 where it gives a tensor.
    """

    def __init__(self, original: nn.Module, name: str, flow: Flow, outputs: int) -> None:
        super().__init__(original, name, flow)
        self._outputs = outputs

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self._shaped(torch.zeros_like(first_tensor(inputs, keywords)))

    def _shaped(self, output: Tensor) -> Any:
        return (output, *[None] * (self._outputs - 1)) if self._outputs else output


def first_tensor(inputs: Any, keywords: Any) -> Tensor:
    return next(leaf for leaf in (*inputs, *keywords.values()) if isinstance(leaf, Tensor))


class Outside(_Absent):
    """A module with parameters beside the layers, such as GPT-2's positions, that is in another chunk."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self._like(inputs, keywords)


class OutsideList(Outside):
    """A container beside the layers, such as a ParameterList with a scale for every block."""

    def __getitem__(self, key: Any) -> Any:
        inside = self.__dict__["_inside"]
        return inside[key] if isinstance(key, str) else [*inside.values()][key]

    def __iter__(self) -> Iterator[Any]:
        inside = self.__dict__["_inside"]
        return iter(inside if hasattr(self._kind, "items") else inside.values())

    def __len__(self) -> int:
        return len(self.__dict__["_inside"])


def outside(module: nn.Module, name: str, flow: Flow) -> Outside:
    """In the place of a module that is in another chunk."""
    return (OutsideList if hasattr(type(module), "__iter__") else Outside)(module, name, flow)


class ArgumentElsewhere:
    """The model's first argument on a rank that does not have it: layers of other chunks take it, nothing else can."""

    def __init__(self, name: str | None) -> None:
        self.__dict__["name"] = name

    def _refuse(self, *others: Any) -> Any:
        name = self.__dict__["name"]
        raise ValueError(
            f"cut: the model's forward uses its argument {name!r} outside of its first layer, and other chunks do not "
            f"have it: give it as a side input, pipe.step(None, targets, side={{{name!r}: tensor}}), on every rank"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))._refuse()

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__


def like_parameter(parameter: Tensor, owner: str) -> Placeholder:
    """In the place of a parameter; a placeholder has its value, so that it is never on the meta device."""
    device = "cpu" if parameter.is_meta else parameter.device
    return placeholder(torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape), owner)


def result_of(output: Any) -> Any:
    """Of an output of the transformers library what a loss takes; others as they are."""
    for name in ("logits", "last_hidden_state") if isinstance(output, Mapping) else ():
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    return output
