"""Checkpoints whose numbers are not the weights: quantised ones, and tensors beside weights that a model does not take.

What the transformers library can dequantise as it reads is read so. All else is refused: read as they are, numbers
without their scales would be other weights.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from zbkern.pipeline.models.layers import is_transformer
from zbkern.schedules.units import some

logger = logging.getLogger("zbkern")

_METHODS = "fp8", "mxfp4"  # that the library dequantises with torch alone
_IN_16_BITS = "write it in 16 bits first (from_pretrained(folder).dequantize().save_pretrained(other))"


def dequantizer(model: Any, where: str) -> Any:
    """The library's quantizer that reads a quantised checkpoint as numbers; None for one that is not quantised.

    Raises ValueError for a method that the library does not read as numbers.
    """
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    method = getattr(method, "value", method)
    found = None
    if method in _METHODS:
        from transformers.quantizers.auto import AutoHfQuantizer

        found = AutoHfQuantizer.from_config(copy.deepcopy(settings), pre_quantized=True)
    if found is None or "dequantize" not in found.get_load_operations():
        raise ValueError(f"cut: {where} are quantised ({method}), which cannot be read as numbers: {_IN_16_BITS}")
    found.quantization_config.dequantize = True
    return found


def check_stored(model: nn.Module, stored: Mapping[str, Any], where: str, quantizer: Any) -> None:
    """Raises ValueError for tensors of the files that are no numbers for the model's parameters, and for those beside
    them that nothing takes; logs others that nothing takes."""
    tensors: dict[str, Tensor] = {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}
    taken = _taken(model, stored, tensors, quantizer)
    for name, tensor in stored.items():
        kind, target = tensor.get_dtype(), tensors.get(taken.get(name) or "")
        if quantizer is None and _is_quantised(kind) and (target is None or target.is_floating_point()):
            raise ValueError(
                f"cut: {where} have {name!r} in {kind}, which is quantised, and the model's configuration has no "
                f"quantization_config: take the configuration of that folder, or {_IN_16_BITS}"
            )
    unused = [name for name, target in taken.items() if target is None]
    holders = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    if beside := [name for name in unused if name.rpartition(".")[0] in holders]:
        raise ValueError(
            f"cut: {where} have {some(beside, 3)}, which the model does not take although it takes others of the same "
            "module: a model with them computes something else; build it from the configuration of that folder"
        )
    if unused:
        logger.warning("cut: %s have tensors that the model does not take: %s", where, some(unused, 3))


def _is_quantised(kind: str) -> bool:
    """Whether numbers of this kind, by the name that safetensors has for it, need a scale."""
    return kind.startswith(("F8_", "F6_")) or kind in ("F4", "I8", "U8", "I4", "U4")


def _taken(model: Any, stored: Iterable[str], tensors: Mapping[str, Tensor], quantizer: Any) -> dict[str, str | None]:
    """For each name in the files, which of the model's tensors is made of it; None where none is."""
    if not is_transformer(model):
        return {name: name if name in tensors else None for name in stored}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    mapping: Any = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if not isinstance(entry, WeightRenaming)]
    prefix = model.base_model_prefix
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    found: dict[str, str | None] = {}
    for name in stored:
        if any(re.search(pattern, name) for pattern in ignored):
            continue
        own = [rename_source_key(name, *how, prefix, tensors)[0] for how in ((renamings, converters), ([], []))]  # type: ignore[arg-type]
        found[name] = next((each for each in own if each in tensors), None)
    return found
