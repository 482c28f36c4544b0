"""What the forward of a chunk gets of a batch: which arguments go to which chunk, and which are refused."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zbkern.pipeline.models.layers import is_transformer

# Beginnings of arguments' names in the library: of images, videos and sound; and of all that the first chunk takes.
_OF_ENCODERS = ("pixel_values", "input_features", "input_values")
_EMBEDDED = ("inputs_embeds", *_OF_ENCODERS)
_SIMILAR = 0.75  # attn_mask is to attention_mask, and attention_mask is not to output_attentions
# Kinds of models that use what an encoder gives in no other place
_ENCODERS_BEFORE_BLOCKS: tuple[str, ...] = (
    "llava",
    "vipllava",
    "qwen2_vl",
    "qwen2_5_vl",
    "glm4v",
    "gemma3",
    "paligemma",
)
_ENCODERS_BEFORE_BLOCKS += ("internvl", "smolvlm", "mistral3", "aya_vision")


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

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__


def split_batch(whole: Any, has_encoder: bool, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a batch by the names of the model's arguments, what the first chunk alone takes: its first argument, such
    as token ids, embeddings and pixels; and what every chunk takes. Labels are the loss function's. Token ids go to
    every chunk where they show what is padding to a classifier, or where images are."""
    own = next(iter(inspect.signature(whole.forward).parameters), "")
    encoded = any(name.startswith(_OF_ENCODERS) for name in (*batch, own))
    first_alone = {name for name in batch if name != own and name.startswith(_EMBEDDED)}
    if any(name.endswith("_grid_thw") for name in batch):  # rows of pixels are patches, not rows of the batch
        first_alone = set()
    here = first_alone if encoded or pools_by_padding(whole) else first_alone | {own}
    every = {name: value for name, value in batch.items() if name not in here | {"labels"} and value is not None}
    if has_encoder and "labels" in batch and not any(name.startswith("decoder_input") for name in every):
        every["decoder_input_ids"] = _shifted(whole, batch["labels"])
    return {name: batch[name] for name in batch if name in here}, every


def _shifted(whole: Any, labels: Tensor) -> Tensor:
    """What a decoder reads to predict the labels, as the library makes it of them: by a method, or in its forward."""
    if hasattr(whole, "prepare_decoder_input_ids_from_labels"):
        return whole.prepare_decoder_input_ids_from_labels(labels)
    forward, name = inspect.unwrap(type(whole).forward), "shift_tokens_right"
    if name not in forward.__code__.co_names:
        raise ValueError(
            f"cut: a batch for {type(whole).__name__} must have decoder_input_ids, which the library does not "
            "make of labels for it: the labels one later, behind config.decoder_start_token_id, on every rank"
        )
    config = whole.config
    return forward.__globals__[name](labels, config.pad_token_id, config.decoder_start_token_id)


def refuse_unknown(whole: Any, known: frozenset[str], side: dict[str, Any]) -> None:
    """The library's models take any further argument, and do nothing with it."""
    for name in side if known else ():
        if name not in known:
            like = difflib.get_close_matches(name, known, 1, _SIMILAR)
            if "mask" in name:
                like += [each for each in ("attention_mask",) if each in known]
            rename = f", or give it by the name that the model has for it, such as {like[0]!r}" if like else ""
            raise ValueError(
                f"cut: {type(whole).__name__} has no argument {name!r} and would ignore it: leave it out of "
                f"the batch and of side{rename}"
            )


def without_images(
    whole: Any, own: str | None, side: dict[str, Any], layers: Sequence[str], first: float, last: float
) -> dict[str, Any]:
    """Side inputs without those of an encoder beside the layers, whose chunk has put them among the embeddings."""
    encoded = [name for name in side if name.startswith(_OF_ENCODERS) and name != own]
    kind = whole.config.model_type
    if encoded and kind not in _ENCODERS_BEFORE_BLOCKS:
        raise ValueError(
            f"cut: what {kind} makes of {encoded[0]!r} may go to layers of several chunks; only for "
            f"{', '.join(_ENCODERS_BEFORE_BLOCKS)} it is known to go into the embeddings alone: train it on text, "
            "or write the chunks by hand"
        )
    if encoded and 1 in (first, last):
        raise ValueError(
            f"cut: what the model makes of {encoded[0]!r} is put among the embeddings after "
            f"{layers[0]!r} and before {layers[1]!r}; both must be in one chunk: cut elsewhere"
        )
    shown = [*encoded, *(name for name in side if name.endswith("_grid_thw"))]
    if shown and first > 0 and "input_ids" not in side:
        raise ValueError(
            f"cut: {kind} finds by token ids where {shown[0]!r} is in its rows: give them as a side input, "
            "side={'input_ids': tokens, ...}, on every rank"
        )
    return side if first == 0 else {name: value for name, value in side.items() if name not in encoded}


def known_arguments(whole: Any) -> frozenset[str]:
    """What a forward in a model of transformers takes or looks up by name, and what the library hands on; else none."""
    if not is_transformer(whole):
        return frozenset()
    from transformers.utils import TransformersKwargs

    known = {*TransformersKwargs.__annotations__}
    for kind in {type(module) for module in whole.modules()}:
        forward = inspect.unwrap(kind.forward)
        known.update(inspect.signature(forward).parameters)
        if hasattr(forward, "__code__"):
            known.update(each for each in forward.__code__.co_consts if isinstance(each, str) and each.isidentifier())
    return frozenset(known)


def pools_by_padding(whole: Any) -> bool:
    """Whether its forward, under whatever decorators, looks for the last token of a row, before its padding or at an
    end of text, or counts the choices of its rows."""
    code = getattr(inspect.unwrap(whole.forward), "__code__", None)
    names = {*code.co_names} if is_transformer(whole) and code is not None else set()
    ends = {"pad_token_id", "argmax"} <= names or {"eos_token_id", "eq"} <= names
    return ends or (code is not None and "num_choices" in code.co_varnames)
