"""Models of the transformers library in slices: the cache that they read keys, values and states of earlier tokens from
is, for every slice, its `Carry`. And in packs: masks for those that make none of positions that begin anew."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils, masking_utils

from zbkern.pipeline.models.families import (
    asks_for_positions,
    begins_with_state,
    cache_argument,
    makes_masks_of_positions,
)

_KNOWN_LAYERS = (cache_utils.DynamicLayer, cache_utils.LinearAttentionLayer, cache_utils.DummyLayer)


class SlicedCache(cache_utils.DynamicCache):
    """The library's cache for one slice of a sequence, whose layers are those of the configuration."""

    def __init__(self, config: Any, carry: Any) -> None:
        super().__init__(config=config)
        self._carry = carry

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        window = self._window(layer_idx)
        return (
            self._carry.append(("keys", layer_idx), key_states, key_states.dim() - 2, window),
            self._carry.append(("values", layer_idx), value_states, value_states.dim() - 2, window),
        )

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return self._carry.append(("indexer", layer_idx), indexer_key_states, 1)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        before = self.get_conv_state(layer_idx, state_idx)
        size = conv_kernel_size or conv_states.shape[-1]
        if before is not None:
            conv_states = torch.cat([before, conv_states], dim=-1)
        kept = nn.functional.pad(conv_states[..., -size:], (max(0, size - conv_states.shape[-1]), 0))
        self._carry.keep(("convolution", layer_idx, state_idx), kept)
        return conv_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._carry.state(("convolution", layer_idx, state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._carry.keep(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._carry.state(("recurrent", layer_idx, state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._carry.start > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # a slice of one token is not a step of decoding, which would write into states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._carry.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        window = self._window(layer_idx)
        offset = 0 if window is None else max(0, self._carry.start - window + 1)
        return self._carry.start - offset + query_length, offset

    def _window(self, layer: int) -> int | None:
        known: Any = self.layers[layer] if layer < len(self.layers) else None
        return known.sliding_window if getattr(known, "is_sliding", False) else None


def check_sliceable(model: Any) -> None:
    """Raises ValueError where a model cannot take slices, naming what needs the whole sequence."""
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False) or cache_argument(model) is None:
        raise _whole(f"{name} has no cache of earlier tokens that its forward reads")
    file = type(model).__module__
    beside = [each for each in vars(sys.modules[file]).values() if getattr(each, "__module__", None) == file]
    if any(isinstance(each, type) and each.__name__.endswith("Cache") for each in beside):
        raise _whole(f"{name} keeps earlier tokens in a cache of its own")
    if stuck := [part for part, module in model.named_modules() if not begins_with_state(module)]:
        raise _whole(f"{stuck[0]} of {name} begins each forward with a new state")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            f"cut: {name} reads no cache with gradient checkpointing: call model.gradient_checkpointing_disable() (as "
            "of transformers 5.24 activation_checkpointing_disable()), and recompute by the schedule "
            "(StepOptions(recompute=...))"
        )
    for number, layer in enumerate(cache_utils.DynamicCache(config=config).layers):
        if not isinstance(layer, _KNOWN_LAYERS):
            raise _whole(f"layer {number} of {name} keeps earlier tokens in a {type(layer).__name__}")


def arguments_of_slice(model: Any, side: dict[str, Any], carry: Any) -> dict[str, Any]:
    """The side inputs of a slice with its cache, and with a mask of all tokens so far. Raises ValueError for masks of
    another shape."""
    cache = SlicedCache(model.config, carry)
    argument = cache_argument(model)
    found = {**side, "use_cache": True, str(argument): cache}
    mask, positions = side.get("attention_mask"), side.get("position_ids")
    if not any(isinstance(layer, cache_utils.DynamicLayer) for layer in cache.layers):
        return found  # states alone take the mask of the slice, and no positions
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise ValueError(
                "cut: attention_mask must be [rows, tokens] in a schedule with slices, with 0 for padding; got "
                f"{list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
            )
        found["attention_mask"] = carry.append("attention_mask", mask, 1)
    elif (
        positions is not None
        and positions.dim() == 2
        and (makes_masks_of_positions(model) or _is_attention_alone(model))
    ):
        so_far = carry.append("position_ids", positions, 1)
        if (masks := _packed_masks(model, so_far, cache)) is not None:
            found["attention_mask"] = masks
    if (
        positions is None
        and "position_ids" in inspect.signature(model.forward).parameters
        and not asks_for_positions(model)
    ):
        found["position_ids"] = torch.arange(carry.start, carry.end, device=_first(model).device)[None]
    return found


def needs_masks_of_packs(model: Any) -> bool:
    """Whether sequences packed into a row see each other unless it is given masks: gpt-oss makes none of positions
    that begin anew."""
    return _is_attention_alone(model) and not makes_masks_of_positions(model)


def masks_of_pack(model: Any, side: dict[str, Any]) -> dict[str, Any]:
    """The side inputs of whole rows, with masks where sequences are packed into them."""
    positions = side["position_ids"]
    if positions.dim() != 2 or side.get("attention_mask") is not None or "flash" in model.config._attn_implementation:
        return side
    masks = _packed_masks(model, positions, None)
    return side if masks is None else {**side, "attention_mask": masks}


def _is_attention_alone(model: Any) -> bool:
    """Whether all that it keeps of earlier tokens are keys and values, of a decoder that takes positions."""
    takes = cache_argument(model) is not None and "position_ids" in inspect.signature(model.forward).parameters
    layers = cache_utils.DynamicCache(config=model.config).layers
    return takes and bool(layers) and all(isinstance(layer, cache_utils.DynamicLayer) for layer in layers)


def _packed_masks(model: Any, so_far: Tensor, cache: SlicedCache | None) -> Any:
    """Masks in which each token sees those of its own sequence among those packed into its row; None for no packs.

    so_far: positions in these sequences, of all tokens up to the end of the slice. cache: None for whole rows.
    """
    packed: Any = masking_utils.find_packed_sequence_indices(so_far)
    if packed is None:
        return None
    kind: str = model.config._attn_implementation
    chunk: Any = getattr(model.config, "attention_chunk_size", None)
    if cache is not None and kind not in ("eager", "sdpa"):
        raise ValueError(
            "cut: packed rows in slices need attn_implementation 'sdpa' or 'eager', whose masks say what a token sees; "
            f"got {kind!r}"
        )

    def same(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return packed[batch, query] == packed[batch, key]

    def same_chunk(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return same(batch, head, query, key) & (so_far[batch, query] // chunk == so_far[batch, key] // chunk)

    positions = so_far if cache is None else so_far[:, cache.get_seq_length() :]
    like = torch.empty((*positions.shape, 1), dtype=_first(model).dtype, device=positions.device)
    how = model.config, like, None, cache
    masks = masking_utils.create_masks_for_generate(*how, and_mask_function=same)
    if masks is None:  # there are kinds of layers that it has no masks for
        masks = {"full_attention": masking_utils.create_causal_mask(*how, and_mask_function=same)}
    if isinstance(masks, dict) and "chunked_attention" in masks:  # chunks begin anew with each sequence
        causal = masking_utils.causal_mask_function
        masks["chunked_attention"] = masking_utils.create_chunked_causal_mask(
            *how, or_mask_function=causal, and_mask_function=same_chunk
        )
    return masks


def _first(model: Any) -> Tensor:
    """A parameter, for its dtype and device; where a chunk has the head alone, the model below it has none."""
    return next(model.parameters(), torch.empty(0))


def _whole(why: str) -> ValueError:
    return ValueError(f"cut: {why}; it needs whole sequences: use a schedule without slices")
