"""What the forward of a chunk gets of a batch: which arguments go to which chunk, and which are refused."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from zbkern.pipeline.models.families import ENCODERS_BEFORE_BLOCKS, decoder_inputs, known_arguments, pools_by_padding
from zbkern.pipeline.models.rewritten import Place

# Beginnings of arguments' names in the library: of images, videos and sound; and of all that the first chunk takes.
_OF_ENCODERS = ("pixel_values", "input_features", "input_values")
_EMBEDDED = ("inputs_embeds", *_OF_ENCODERS)
_SIMILAR = 0.75  # attn_mask is to attention_mask, and attention_mask is not to output_attentions


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
        every["decoder_input_ids"] = decoder_inputs(whole, batch["labels"])
    return {name: batch[name] for name in batch if name in here}, every


class LibraryArguments:
    """The side inputs of a chunk's forward as a model of the transformers library takes them: with the cache of a slice
    and masks of packs, without what other chunks alone take, and none that it does not know."""

    def __init__(self, whole: Any, place: Place) -> None:
        self._whole, self._place = whole, place
        self._known = known_arguments(whole)  # before layers are converted
        self._needs_masks: bool | None = None  # of packs

    def begin(self, side: dict[str, Any], carry: Any) -> dict[str, Any]:
        whole, place = self._whole, self._place
        side = {name: value for name, value in side.items() if name != "carry"}
        _refuse_unknown(whole, self._known, side)
        side = {"use_cache": False, **side}
        if carry is not None:
            layers = map(whole.get_submodule, place.layers)
            if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
                check_sliceable(whole)  # it was switched on since, and layers would read no earlier slice
            side = _sliced_cache().arguments_of_slice(whole, side, carry)
        elif side.get("position_ids") is not None:
            if self._needs_masks is None:
                self._needs_masks = _sliced_cache().needs_masks_of_packs(whole)
            side = _sliced_cache().masks_of_pack(whole, side) if self._needs_masks else side
        if place.first > 0 or not place.is_last:
            side = _without_images(whole, side, place.names, place.first, place.last)
        return side

    def end(self) -> None:
        """There is nothing that it has changed."""


def check_sliceable(whole: Any) -> None:
    """Raises ValueError where a model of the library cannot take slices, naming what needs the whole sequence."""
    if pools_by_padding(whole):
        raise ValueError(
            f"cut: {type(whole).__name__} looks for the last token of whole sequences: use a schedule without slices"
        )
    _sliced_cache().check_sliceable(whole)


def _sliced_cache() -> Any:
    """The module that needs the transformers library."""
    from zbkern.pipeline.models import sliced_cache

    return sliced_cache


def _refuse_unknown(whole: Any, known: frozenset[str], side: dict[str, Any]) -> None:
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


def _without_images(
    whole: Any, side: dict[str, Any], layers: Sequence[str], first: float, last: float
) -> dict[str, Any]:
    """Side inputs without those of an encoder beside the layers, whose chunk has put them among the embeddings."""
    own = next(iter(inspect.signature(whole.forward).parameters), None)
    encoded = [name for name in side if name.startswith(_OF_ENCODERS) and name != own]
    kind = whole.config.model_type
    if encoded and kind not in ENCODERS_BEFORE_BLOCKS:
        raise ValueError(
            f"cut: what {kind} makes of {encoded[0]!r} may go to layers of several chunks; only for "
            f"{', '.join(ENCODERS_BEFORE_BLOCKS)} it is known to go into the embeddings alone: train it on text, "
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
