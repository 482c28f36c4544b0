"""The layers of a model, in the order in which they run: where it can be cut."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zbkern.pipeline.models.adapters import without_wrapper
from zbkern.pipeline.models.halves import Halves, halves_of
from zbkern.pipeline.models.residual import WholeBlock
from zbkern.pipeline.models.router_losses import has_router_loss
from zbkern.schedules.layout import HALVES

logger = logging.getLogger("zbkern")

KINDS = {"embedding": "E", "block": "t", "mtp": "m", "norm": "L", "head": "L"}  # and Megatron's letters for them


class Layer(NamedTuple):
    """One layer of a model, or half a block: its name there, its kind, its number of parameters, and what it shares.

    kind: "embedding", "block", "mtp", "norm" or "head". tied: the first name of a parameter that others have, too.
    """

    name: str
    kind: str
    parameters: int
    tied: str | None = None

    @property
    def letter(self) -> str:
        """What Megatron's layouts call it (`zbkern.schedules.layout`)."""
        return KINDS[self.kind]


def layers_of(
    model: nn.Module | Any, layers: Sequence[str] | Mapping[str, str] | None = None, *, halves: bool = False
) -> tuple[Layer, ...]:
    """The layers at which `cut` can cut this model, in the order in which they run.

    model: on any device, "meta" included, or a configuration of the transformers library. layers: names of modules in
    that order, `blocks.*` for all children of `blocks`; or {name: kind}; each is called once in a forward and gets all
    it needs of the layers before from the output of the one before it. None for a decoder of the transformers library:
    embedding, blocks, norm, head. halves: lists blocks that can be cut between attention and MLP as two, named
    "model.layers.3:attention" and "model.layers.3:mlp"; partitions have the numbers 4 and 4.5 for these where the block
    is layer 4. A block that does more outside of these parts than to add them is whole; the log says why. Raises
    TypeError for what is no model or no names, ValueError for a name that the model has not, for layers inside each
    other, and for a model whose layers are to be named.
    """
    return listed(divided("layers_of", model, layers), halves)


class Divided(NamedTuple):
    """A model and its layers, in the order in which they run.

    kinds: {layer: its kind}. owners, ties: as `owners_of` and `shared_parameters` return them.
    """

    model: nn.Module
    kinds: dict[str, str]
    owners: dict[str, int]
    ties: dict[str, dict[str, str]]


def divided(caller: str, model: nn.Module | Any, layers: Sequence[str] | Mapping[str, str] | None) -> Divided:
    """With the arguments and errors of `layers_of`."""
    model = built(caller, model)
    if isinstance(layers, str) or not isinstance(layers, Sequence | Mapping | None):
        raise TypeError(f"layers_of: layers must be a list of names of modules, or {{name: kind}}; got {layers!r}")
    kinds = _layers_of_the_library(model) if layers is None else _named_layers(model, layers)
    names = [*kinds]
    owners = owners_of(model, names)
    return Divided(model, kinds, owners, shared_parameters(model, names, owners))


def listed(whole: Divided, halves: bool = False) -> tuple[Layer, ...]:
    """As `layers_of` returns them."""
    found = []
    for name, kind in whole.kinds.items():
        module, tied = whole.model.get_submodule(name), next(iter(whole.ties.get(name, ())), None)
        found.append(Layer(name, kind, sum(p.numel() for p in module.parameters()), tied))
        if halves and kind == "block":
            try:
                parts = halves_of_layer(whole.model, found[-1])
                found[-1:] = [Layer(name + end, kind, parts.parameters(module, n)) for n, end in enumerate(HALVES)]
            except WholeBlock as reason:
                logger.info("layers_of: %r cannot be cut in halves: %s", name, reason)
    return tuple(found)


def halves_of_layer(model: nn.Module, layer: Layer) -> Halves:
    """The halves of a block in a model. Raises WholeBlock with the reason where it has none."""
    if layer.tied:
        raise WholeBlock(f"it shares weights with other layers, such as {layer.tied!r}")
    if encoder_of(model):
        raise WholeBlock("it is of an encoder-decoder")
    return halves_of(model.get_submodule(layer.name))


def built(caller: str, model: Any) -> nn.Module:
    """A configuration of the transformers library as a model on the meta device; a module without peft's wrapper."""
    if isinstance(model, nn.Module):
        model = without_wrapper(caller, model)
        if is_transformer(model):
            _check_library(caller)
        return model
    if not hasattr(model, "model_type"):
        raise TypeError(
            f"{caller}: model must be a torch.nn.Module or a configuration of the transformers library; got "
            f"{type(model).__name__}"
        )
    _check_library(caller)
    reasons = []
    for kind in _classes_for(model):
        try:
            with torch.device("meta"):
                return kind(model)
        except ValueError as error:
            reasons.append(str(error).partition("\n")[0])
    raise ValueError(
        f"{caller}: model must be a configuration that names its class in `architectures`, or of which "
        f"AutoModelForCausalLM makes a decoder, or the model itself; got {type(model).__name__}: {reasons[0]}"
    )


def _check_library(caller: str) -> None:
    """Raises ImportError for a version of the transformers library whose models are other ones."""
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    if version.partition(".")[0] in ("2", "3", "4"):
        raise ImportError(
            f"{caller}: models of the transformers library must be of version 5 or later; got {version}: pip install "
            "'transformers>=5'"
        )


def _classes_for(config: Any) -> list[Any]:
    """What makes a model of a configuration: the class with a head that it was saved with; else what may fit."""
    import transformers

    saved = next(iter(config.architectures or ()), "")
    own = getattr(transformers, saved, None)
    headless = {*transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES.values()}
    if own is not None and saved not in headless:
        return [own._from_config]
    kinds: list[Any] = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    if getattr(config, "is_encoder_decoder", False):
        kinds.insert(0, transformers.AutoModelForSeq2SeqLM)
    return [kind.from_config for kind in kinds]


def shared_parameters(model: nn.Module, names: Sequence[str], owners: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """{layer: {first name in the model: name in the layer}} of the parameters that several of these layers have, each
    with what stands beside the layers and belongs to it: see `owners_of`."""
    labels = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[int, dict[str, str]] = {}  # by parameter: the layer, and the parameter's name in the model
    for layer in names:
        for key, parameter in model.get_submodule(layer).named_parameters(prefix=layer, remove_duplicate=False):
            holders.setdefault(id(parameter), {}).setdefault(layer, key)
    for module, owner in owners.items():
        for key, parameter in model.get_submodule(module).named_parameters(prefix=module, recurse=False):
            holders.setdefault(id(parameter), {}).setdefault(names[owner], key)
    ties: dict[str, dict[str, str]] = {}
    for number, held in holders.items():
        for module, key in held.items() if len(held) > 1 else ():
            ties.setdefault(module, {})[labels[number]] = key
    return ties


def owners_of(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """{module outside of the layers: number of the layer that it belongs to}, of those that have tensors of their own.

    That is the first to run of the layers defined later. What is added to embeddings is defined after them, and before
    the blocks. Tensors are parameters and saved buffers. Another name of a layer is no module outside.
    """
    numbers = {name: index for index, name in enumerate(names)}
    layers = {model.get_submodule(name) for name in names}
    every = [*model.named_modules(remove_duplicate=False)]
    inside = tuple(f"{name}." for name, module in every if module in layers)
    owners: dict[str, int] = {}
    first = len(names) - 1
    for name, module in reversed(every):
        if name in numbers:
            first = min(first, numbers[name])
        elif not f"{name}.".startswith(inside):
            own = [parameter for parameter in module._parameters.values() if parameter is not None]
            if own or set(module._buffers) - module._non_persistent_buffers_set:
                owners[name] = first
    return owners


def is_transformer(model: nn.Module) -> bool:
    """Whether this is a model of the transformers library, which takes embeddings instead of token ids."""
    return all(hasattr(model, name) for name in ("config", "get_input_embeddings", "base_model_prefix"))


def _named_layers(model: nn.Module, layers: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    kinds = dict(layers) if isinstance(layers, Mapping) else dict.fromkeys(layers, "block")
    found: dict[str, str] = {}
    known = dict(model.named_modules(remove_duplicate=False))
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"layers_of: the kind of layer {name!r} must be one of {list(KINDS)}; got {kind!r}")
        parent, children = str(name).removesuffix(".*").removesuffix("*"), [name]
        if str(name).endswith("*") and parent in known:
            children = _children(model, parent)
            _check_once(
                {f"{parent}.{key}".lstrip("."): part for key, part in model.get_submodule(parent)._modules.items()}
            )
        missing = [child for child in children if child not in known]
        if missing or not children:
            some = [child for child, _ in model.named_children()]
            raise ValueError(f"layers_of: the model has no module {name!r}; its own are {some}, and what is in them")
        found.update(dict.fromkeys(children, kind))
    inside = [(a, b) for a in found for b in found if b.startswith(f"{a}.")]
    if inside or not found:
        what = f"{inside[0][1]!r} inside of {inside[0][0]!r}" if inside else "none"
        raise ValueError(f"layers_of: layers must be modules beside each other, at least one; got {what}")
    _check_once({name: known[name] for name in found})
    return found


def _check_once(modules: Mapping[str, nn.Module | None]) -> None:
    """Raises ValueError where one module has two of these names."""
    firsts: dict[nn.Module, str] = {}
    for name, module in modules.items():
        if module is not None and firsts.setdefault(module, name) != name:
            raise ValueError(
                f"layers_of: {firsts[module]!r} and {name!r} are one module, and each layer is called once: make them "
                "two modules, which may share parameters"
            )


def encoder_of(model: Any) -> str:
    """The name of a model's encoder, where a decoder follows; else none. Of the transformers library alone."""
    if not is_transformer(model) or not getattr(model.config, "is_encoder_decoder", False):
        return ""
    return name_in(model, model.get_encoder())


def _layers_of_the_library(model: nn.Module) -> dict[str, str]:
    """Embedding, blocks, and what has parameters and is defined after them, of a model of the transformers library; of
    an encoder first."""
    if not is_transformer(model):
        if isinstance(model, nn.Sequential):
            _check_once(model._modules)
            return {name: "block" for name, _ in model.named_children()}
        raise ValueError(f"layers_of: {type(model).__name__} is no model of the transformers library; {_remedy(model)}")
    has_router_loss(model)
    dropped = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    if dropping := next((name for name in dropped if getattr(model.config, name, 0)), None):
        raise ValueError(
            f"layers_of: config.{dropping} must be 0 when the model is made: it leaves layers out at random, and a "
            "pipeline passes each layer once in every forward"
        )
    if encoder := encoder_of(model):
        return _of_stack(model, encoder, encoder) | _of_stack(model, name_in(model, model.get_decoder()), "")  # type: ignore[operator]
    return _of_stack(model, "", "")


def _of_stack(model: Any, stack: str, outermost: str) -> dict[str, str]:
    """The layers of the blocks in a module, and of what stands beside it and what holds it, as far as the outermost."""
    part = model.get_submodule(stack)
    try:
        config, embedding = model.config.get_text_config(), name_in(model, part.get_input_embeddings())
    except (NotImplementedError, AttributeError, ValueError) as error:  # of sounds, of numbers over time, of several
        raise _without_embedding(model) from error
    if not stack and isinstance(model.get_submodule(embedding), nn.Conv1d):  # the first of several, of sounds
        raise _without_embedding(model)
    lists = {name: each for name, each in part.named_modules(prefix=stack) if isinstance(each, nn.ModuleList)}
    count = getattr(config, "num_hidden_layers", None)
    blocks = [name for name, each in lists.items() if len(each) == count]
    blocks = blocks or [name for name, each in lists.items() if len(each) > 1 and len({*map(type, each)}) == 1]
    blocks = [name for name in blocks if not any(name.startswith(f"{other}.") for other in blocks)]
    if not embedding or len(blocks) != 1:
        raise ValueError(
            f"layers_of: {type(model).__name__} must have one embedding and one list of its blocks, of "
            f"{count} or of one kind; got {embedding or None!r} and {blocks}; {_remedy(model)}"
        )
    if not isinstance(model.get_submodule(embedding), nn.Embedding):  # of images: with its positions
        outer = [embedding.rsplit(".", count)[0] for count in range(embedding.count(".") + 1)]
        embedding = [name for name in outer if not blocks[0].startswith(f"{name}.")][-1]
    head = name_in(model, model.get_output_embeddings())
    path = blocks[0].split(".")
    early, late = [], {}
    for depth in reversed(range(outermost.count(".") + bool(outermost), len(path))):  # from beside the blocks outwards
        parent = ".".join(path[:depth])
        names = [name for name in _children(model, parent) if any(True for _ in model.get_submodule(name).parameters())]
        place = names.index(".".join(path[: depth + 1]))
        before, after = names[:place], names[place + 1 :]
        if config.model_type != _NORM_AT_THE_END:
            early += [name for name in after if name.endswith(_NORM_OF_EMBEDDINGS)]
        after = [*sorted(name for name in before if _runs_late(name, head)), *(n for n in after if n not in early)]
        late.update({name: "head" if name == head or not parent else "norm" for name in after})
    of_blocks = dict.fromkeys((f"{blocks[0]}.{index}" for index in range(len(lists[blocks[0]]))), "block")
    return {embedding: "embedding", **dict.fromkeys(early, "norm"), **of_blocks, **late}


def _remedy(model: nn.Module) -> str:
    names = _own_names(model, "")
    plain = [name for name in names if not name.endswith(".*")]
    added = [name for name in plain if isinstance(model.get_submodule(name), nn.Embedding)][1:]  # such as of positions
    names = [name for name in names if name not in added]
    return "name them in the order in which they run" + (f", such as layers={names}" if names else "")


def _own_names(model: nn.Module, parent: str) -> list[str]:
    """Of modules with parameters, as they are defined: those around a list in their parts, and a list by one name."""
    found: list[str] = []
    for name in _children(model, parent):
        module = model.get_submodule(name)
        if type(module) is nn.ModuleList:
            found.append(f"{name}.*")
        elif any(type(each) is nn.ModuleList for each in module.modules()):
            found += _own_names(model, name)
        elif any(True for _ in module.parameters()):
            found.append(name)
    return found


def _without_embedding(model: nn.Module) -> ValueError:
    return ValueError(
        f"layers_of: {type(model).__name__} has no embedding of tokens or images, by which layers would be found; "
        f"{_remedy(model)}; or put its modules into a torch.nn.Sequential, each of which takes what the one before "
        "returns"
    )


def check_encoder(caller: str, model: nn.Module, names: Sequence[str], partition: Iterable[float]) -> None:
    """Raises ValueError where a chunk would begin inside of an encoder of sounds: several convolutions are in front of
    its blocks, and a chunk behind the first cannot know in which shape they give what."""
    encoder = encoder_of(model)
    count = sum(is_within(name, encoder) for name in names) if encoder else 0
    inside = [first for first in partition if 0 < first < count]
    if inside and isinstance(model.get_submodule(names[0]), nn.Conv1d):
        raise ValueError(
            f"{caller}: the encoder of {type(model).__name__}, of sounds, must be in one chunk as a whole; got a chunk "
            f"that begins with {names[int(inside[0])]!r}: give a partition whose chunks begin with layer {count}, "
            f"{names[count]!r}, or later ones, or put its modules into a torch.nn.Sequential"
        )


def _children(model: nn.Module, parent: str) -> list[str]:
    """The names in the model of a module's children."""
    return [f"{parent}.{child}".lstrip(".") for child, _ in model.get_submodule(parent).named_children()]


def is_within(name: str, module: str) -> bool:
    """Whether a name is that of a module, or of something in it."""
    return name == module or name.startswith(f"{module}.")


def name_in(model: nn.Module, module: Any) -> str:
    """The name in the model of a module, or none."""
    return next((name for name, each in model.named_modules() if each is module), "")


_NORM_OF_EMBEDDINGS = ".layernorm_embedding"  # BART's, which is defined after the blocks and runs before them
_NORM_AT_THE_END = "bigbird_pegasus"  # where the one of that name runs after them


def _runs_late(name: str, head: str) -> bool:
    """Whether a module that is defined before the blocks runs after them: what holds the head, and parts of OPT's."""
    inside_of_head = bool(head) and f"{head}.".startswith(f"{name}.")
    return inside_of_head or name.endswith((".final_layer_norm", ".project_out"))
