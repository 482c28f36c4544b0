"""Adapters of the peft library: where they are in a model, merged into what an export writes, or written alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def without_wrapper(caller: str, model: Any) -> Any:
    """The model that a PeftModel has put adapters into; any other as it is."""
    if not hasattr(model, "get_base_model"):
        return model
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise ValueError(
            f"{caller}: model must have its adapters inside of its layers, as LoRA's are; got "
            f"{config.peft_type.value}, whose prompt is added before them"
        )
    return model.get_base_model()


def plain_names(model: nn.Module) -> frozenset[str]:
    """The names that its tensors have once its adapters are merged."""
    names = {*model.state_dict()}
    for name, module in _adapted(model).items():
        plain = module.original_module if hasattr(module, "original_module") else module.get_base_layer()
        names = {key for key in names if not key.startswith(f"{name}.")}
        names.update(f"{name}.{key}" for key in plain.state_dict())
    return frozenset(names)


def check_ties(chunk: Any, tied: Iterable[str]) -> None:
    """Raises ValueError where peft was told to adapt a weight in all layers that have it, and another chunk has one.

    tied: names of such weights as the model was cut. In a model with adapters they are names inside of these.
    """
    configs = [config for each in (chunk, chunk.whole) for config in getattr(each, "peft_config", {}).values()]
    options = [
        name for name in ("ensure_weight_tying", "trainable_token_indices") if any(vars(c).get(name) for c in configs)
    ]
    adapted = _adapted(chunk) if options else {}
    if found := [name for name in tied if name.rpartition(".")[0] in adapted]:
        raise ValueError(
            f"cut: {found[0]!r} is tied to a layer of another chunk, and its adapter would have to be tied, too "
            f"({options[0]}): put adapters into the model before you cut it"
        )


def merged(model: nn.Module, tensors: dict[str, Tensor], tied: Iterable[Tensor]) -> dict[str, Tensor]:
    """Some tensors of a model, under the names and with the values that they have once its adapters are merged."""
    for name, module in _adapted(model).items():
        others = {key: value for key, value in tensors.items() if not key.startswith(f"{name}.")}
        if len(others) == len(tensors):
            continue
        if {*map(id, tied)} & {*map(id, module.parameters())}:
            raise ValueError(
                f"export: the adapter of {name!r} cannot be merged into a weight that is tied to another layer's: "
                "export_adapter writes it alone"
            )
        module = copy.deepcopy(module)  # training goes on with the one that is not merged
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
        else:
            module.merge(safe_merge=True)
            plain = module.get_base_layer()
        tensors = others | {f"{name}.{key}": value for key, value in plain.state_dict().items()}
    return tensors


def holder_of(chunk: Any, name: str) -> Any:
    """The module that peft knows to have an adapter by this name, the chunk or its model; None where it has none."""
    return next((each for each in (chunk, chunk.whole) if name in getattr(each, "peft_config", ())), None)


def adapter_tensors(holder: Any, name: str) -> dict[str, Tensor]:
    """An adapter's tensors under the names that peft saves them by; collective over ranks that hold shards of them."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(holder, adapter_name=name, save_embedding_layers=False)
    return {f"base_model.model.{key}": tensor for key, tensor in tensors.items()}


def config_of(holder: Any, name: str) -> dict[str, Any]:
    """What says beside the tensors how they are to be used, as peft saves it."""
    config = copy.copy(holder.peft_config[name])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(holder, "name_or_path", None)
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}


def config_of_all(configs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """One for the adapters of all chunks, each of which may have found other targets."""
    if not configs:
        raise ValueError(f"export_adapter: a chunk must have an adapter that peft knows as {name!r}; got none")
    targets = [config["target_modules"] for config in configs]
    if not all(isinstance(each, list) for each in targets):  # a pattern, the same in all
        return configs[0]
    return configs[0] | {"target_modules": sorted({*chain(*targets)})}


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The modules that have an adapter, without those inside of such, by name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found
