"""The layers of a model, in the order in which they run: where it can be cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zbkern.pipeline.models.adapters import without_wrapper

KINDS = {"embedding": "E", "block": "t", "mtp": "m", "norm": "L", "head": "L"}  # and Megatron's letters for them

NO_CHAIN = (
    "has an encoder and a decoder, and what the encoder gives goes to all layers of the decoder: it is no chain that "
    "can be cut; cut decoders, or write the chunks by hand"
)


class Layer(NamedTuple):
    """One layer of a model: its name there, its kind, its number of parameters, and what it shares.

    kind: "embedding", "block", "mtp", "norm" or "head". tied: the first name of a parameter that others have, too.
    """

    name: str
    kind: str
    parameters: int
    tied: str | None = None

    @property
    def letter(self) -> str:
        """What Megatron's layouts call it (`zbkern.pipeline.schedules.layout`)."""
        return KINDS[self.kind]


def layers_of(model: nn.Module | Any, layers: Sequence[str] | Mapping[str, str] | None = None) -> tuple[Layer, ...]:
    """The layers at which `cut` can cut this model, in the order in which they run.

    model: on any device, "meta" included, or a configuration of the transformers library. layers: names of modules in
    that order, `blocks.*` for all children of `blocks`; or {name: kind}; each is called once in a forward and gets all
    it needs of the layers before from the output of the one before it. None for a decoder of the transformers library:
    embedding, blocks, norm, head. Raises TypeError for what is no model or no names, ValueError for a name that the
    model has not, for layers inside each other, and for a model whose layers are to be named.
    """
    model = built("layers_of", model)
    if isinstance(layers, str) or not isinstance(layers, Sequence | Mapping | None):
        raise TypeError(f"layers_of: layers must be a list of names of modules, or {{name: kind}}; got {layers!r}")
    named = _decoder_layers(model) if layers is None else _named_layers(model, layers)
    modules = {name: model.get_submodule(name) for name in named}
    ties = shared_parameters(model, modules)
    return tuple(
        Layer(name, kind, sum(p.numel() for p in modules[name].parameters()), next(iter(ties.get(name, ())), None))
        for name, kind in named.items()
    )


def built(caller: str, model: Any) -> nn.Module:
    """A configuration of the transformers library as a model on the meta device; a module without peft's wrapper."""
    if isinstance(model, nn.Module):
        return without_wrapper(caller, model)
    if not hasattr(model, "model_type"):
        raise TypeError(
            f"{caller}: model must be a torch.nn.Module or a configuration of the transformers library; got "
            f"{type(model).__name__}"
        )
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(model)
    except ValueError as error:
        kind = type(model).__name__
        if getattr(model, "is_encoder_decoder", False):
            raise ValueError(f"{caller}: a model of {kind} {NO_CHAIN}") from error
        raise ValueError(
            f"{caller}: model must be a configuration of which AutoModelForCausalLM makes a decoder, or the model "
            f"itself, whose layers you may name; got {kind}: {str(error).partition(chr(10))[0]}"
        ) from error


def shared_parameters(model: nn.Module, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Of each of these modules that shares parameters with another: {first name of the parameter: its name in it}."""
    holders: dict[int, dict[str, str]] = {}  # by parameter: the module, and the parameter's name in the model
    for module in names:
        for key, parameter in model.get_submodule(module).named_parameters(prefix=module, remove_duplicate=False):
            holders.setdefault(id(parameter), {}).setdefault(module, key)
    ties: dict[str, dict[str, str]] = {}
    for held in holders.values():
        if len(held) > 1:
            label = next(iter(held.values()))
            for module, key in held.items():
                ties.setdefault(module, {})[label] = key
    return ties


def is_transformer(model: nn.Module) -> bool:
    """Whether this is a model of the transformers library, which takes embeddings instead of token ids."""
    return all(hasattr(model, name) for name in ("config", "get_input_embeddings", "base_model_prefix"))


def _named_layers(model: nn.Module, layers: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    kinds = dict(layers) if isinstance(layers, Mapping) else dict.fromkeys(layers, "block")
    found: dict[str, str] = {}
    known = dict(model.named_modules())
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"layers_of: the kind of layer {name!r} must be one of {list(KINDS)}; got {kind!r}")
        parent = str(name).removesuffix(".*").removesuffix("*")
        children = [f"{parent}.{child}".lstrip(".") for child, _ in known[parent].named_children()] if (
            str(name).endswith("*") and parent in known
        ) else [name]  # fmt: skip
        missing = [child for child in children if child not in known]
        if missing or not children:
            some = [child for child, _ in model.named_children()]
            raise ValueError(f"layers_of: the model has no module {name!r}; its own are {some}, and what is in them")
        found.update(dict.fromkeys(children, kind))
    inside = [(a, b) for a in found for b in found if b.startswith(f"{a}.")]
    if inside or not found:
        what = f"{inside[0][1]!r} inside of {inside[0][0]!r}" if inside else "none"
        raise ValueError(f"layers_of: layers must be modules beside each other, at least one; got {what}")
    return found


def _decoder_layers(model: nn.Module) -> dict[str, str]:
    """Embedding, blocks, and what has parameters and is defined after them, of a model of the transformers library."""
    remedy = 'name them: layers=["embed", "blocks.*", "norm", "head"], in the order in which they run'
    if not is_transformer(model):
        if isinstance(model, nn.Sequential):
            return {name: "block" for name, _ in model.named_children()}
        raise ValueError(f"layers_of: {type(model).__name__} is no model of the transformers library; {remedy}")
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"layers_of: {type(model).__name__} {NO_CHAIN}")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "layers_of: config.output_router_logits must be False: the loss that it adds is computed from all layers, "
            "and no rank has all; add a loss of the router inside of a layer, or leave it out"
        )
    text = config.get_text_config()
    names = {id(module): name for name, module in model.named_modules()}
    embedding = names.get(id(model.get_input_embeddings()))  # type: ignore[operator]
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    stacks = [name for name, module in lists.items() if len(module) == text.num_hidden_layers]
    stacks = stacks or [name for name, module in lists.items() if len(module) > 1 and len({*map(type, module)}) == 1]
    stacks = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    if embedding is None or len(stacks) != 1:
        raise ValueError(
            f"layers_of: {type(model).__name__} must have one embedding and one list of its blocks, of "
            f"{text.num_hidden_layers} or of one kind; got {embedding!r} and {stacks}; {remedy}"
        )
    head = names.get(id(model.get_output_embeddings()))  # type: ignore[operator]
    found = {embedding: "embedding"}
    found.update({f"{stacks[0]}.{index}": "block" for index in range(len(lists[stacks[0]]))})
    path = stacks[0].split(".")
    for depth in range(len(path) - 1, -1, -1):  # beside the blocks, then beside what holds them
        parent = ".".join(path[:depth])
        children = [name for name, _ in model.get_submodule(parent).named_children()]
        place = children.index(path[depth])
        early = [name for name in children[:place] if _runs_late(f"{parent}.{name}".lstrip("."), head)]
        for child in [*sorted(early), *children[place + 1 :]]:
            name = f"{parent}.{child}".lstrip(".")
            if any(True for _ in model.get_submodule(name).parameters()):
                found[name] = "head" if name == head or not parent else "norm"
    return found


def _runs_late(name: str, head: str | None) -> bool:
    """Whether a module that is defined before the blocks runs after them: what holds the head, and parts of OPT's."""
    return name == head or f"{head}.".startswith(f"{name}.") or name.endswith((".final_layer_norm", ".project_out"))
