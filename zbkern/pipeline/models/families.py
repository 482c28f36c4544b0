"""What is known of families of the transformers library: by their names, or read off the code of their forwards.

Code tells what no signature and no setting does: which arguments a forward looks up by name, whether it makes its masks
of positions, where a recurrent layer begins. A family that a later version writes in another way is found by the tests
of `tests/pipeline/models`, which train every one.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from zbkern.pipeline.models.layers import is_transformer

# Kinds of models that use what an encoder gives in no other place
ENCODERS_BEFORE_BLOCKS = (
    *("llava", "vipllava", "qwen2_vl", "qwen2_5_vl", "glm4v", "gemma3", "paligemma"),
    *("internvl", "smolvlm", "mistral3", "aya_vision"),
)
CACHE_ARGUMENTS = {"cache", "past_key_values", "cache_params"}  # of forwards; the first since transformers 5.24


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


def decoder_inputs(whole: Any, labels: Tensor) -> Tensor:
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


def makes_masks_of_positions(model: Any) -> bool:
    """Whether the model makes its masks with positions, which begin anew with each sequence packed into a row; others
    let a token see those of other sequences. Told by the names that its forward calls with."""
    names = [each for code in _forwards(model) for each in code.co_consts if isinstance(each, tuple)]
    return any({"config", "position_ids"} <= {*each} and not CACHE_ARGUMENTS.isdisjoint(each) for each in names)


def asks_for_positions(model: Any) -> bool:
    """Whether its forward asks the cache for the positions of a slice; else they would begin anew with each."""
    return any("get_seq_length" in code.co_names for code in _forwards(model))


def _forwards(model: Any) -> list[Any]:
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [inspect.unwrap(type(module).forward).__code__ for module in models]


def begins_with_state(module: nn.Module) -> bool:
    """Whether a recurrent layer, which reads a state, begins there; those of the library hand it on by this name. What
    a state is worth may be less than the rounding of 16 bits."""
    code = inspect.unwrap(type(module).forward).__code__
    names = {name for each in code.co_consts if isinstance(each, tuple) for name in each}
    return "get_recurrent_state" not in code.co_names or bool(names & {"initial_state", "initial_states"})


def cache_argument(model: Any) -> str | None:
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in parameters if name in CACHE_ARGUMENTS), None)
