"""The weights of chunks that were cut on the meta device: read from safetensors files, or drawn at random."""

from __future__ import annotations

import copy
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbkern.pipeline.models.chunk import Chunk
from zbkern.pipeline.models.layers import is_transformer, is_within
from zbkern.pipeline.models.quantised import check_stored, dequantizer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Initialiser = Callable[[nn.Module], None]


@torch.no_grad()
def fill(
    model: nn.Module,
    chunks: Sequence[Chunk],
    folder: str | os.PathLike | None,
    init: Initialiser | None,
    seed: int,
    device: torch.device,
) -> None:
    """Gives what is on the meta device in these chunks of a model its memory and values; the rest stays as it is."""
    if folder is not None and not any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "cut: weights must be None for a model that has its weights; build it on the meta device, "
            'in `with torch.device("meta")`'
        )
    made: dict[int, Tensor] = {}  # by tensor on the meta device, which all chunks of a rank share
    with ExitStack() as files:
        stored, where, quantizer = None, f"weights in {folder}", None
        if folder is not None:
            given, quantizer = _stored(Path(folder), files), dequantizer(model, where)
            check_stored(model, given, where, quantizer)
            stored = _with_tied_names(model, given)
        for chunk in chunks:
            if not (empty := _empty(chunk)):
                continue
            if stored is not None:
                _load(chunk, stored, where, device, quantizer)
            for name, original in empty.items():
                loaded = _get(chunk, name)
                if isinstance(original, nn.Parameter) and not loaded.is_meta:
                    loaded.requires_grad_(original.requires_grad)  # itself: the library has marked it as read
                    _set(chunk, name, made.setdefault(id(original), loaded))
            unread = {name: tensor for name, tensor in _empty(chunk).items() if id(tensor) not in made}
            missing = [name for name, tensor in unread.items() if isinstance(tensor, nn.Parameter)]
            if stored is not None and missing:
                raise ValueError(
                    f"cut: {where} must have all of the model; {missing[0]!r} is not there; names "
                    f"there are such as {min(stored, default='')!r}"
                )
            layers = chunk.layer_names if stored is None else []  # else buffers alone are drawn, each in its module
            made.update(_drawn(model, chunk, unread, layers, init, seed, device))
            for name, tensor in _empty(chunk).items():
                _set(chunk, name, made[id(tensor)])
            unset = [name for name in unread if not _has_value(chunk, name)]
            if unset and is_transformer(model):
                _draw_from_outside(model, chunk, unset)
            for name in unset:
                if not _has_value(chunk, name):
                    module = chunk.get_submodule(name.rpartition(".")[0])
                    raise ValueError(
                        f"cut: {name!r} must get its values from weights=, from init=, or from reset_parameters of "
                        f"{type(module).__name__}; it has none. "
                        "Or cut a model that was made with its weights, and not on the meta device"
                    )


def _empty(chunk: Chunk) -> dict[str, Tensor]:
    """What is on the meta device, by name; a tied parameter by each."""
    tensors = [*chunk.named_parameters(remove_duplicate=False), *chunk.named_buffers()]
    return {name: tensor for name, tensor in tensors if tensor.is_meta}


def _get(module: nn.Module, name: str) -> Any:
    """A parameter or a buffer."""
    prefix, _, key = name.rpartition(".")
    return getattr(module.get_submodule(prefix), key)


def _set(chunk: Chunk, name: str, tensor: Tensor) -> None:
    prefix, _, key = name.rpartition(".")
    module = chunk.get_submodule(prefix)
    (module._parameters if key in module._parameters else module._buffers)[key] = tensor  # type: ignore[assignment]


# ---- random


def _drawn(
    model: nn.Module,
    chunk: Chunk,
    empty: Mapping[str, Tensor],
    layers: Sequence[str],
    init: Initialiser | None,
    seed: int,
    device: torch.device,
) -> dict[int, Tensor]:
    """Values for `empty` by tensor, drawn in copies of these layers, or of the modules that hold what is in none.

    Those of a module depend on the seed and its name, not on the partition: what layers share is drawn in the first.
    """
    shared = {id(empty.get(name)) for name in chunk.shared_names.values()}
    homes: dict[str, dict[str, Tensor]] = {}
    for name, tensor in empty.items():
        home, key = name.rpartition(".")[::2]
        if (layer := next((layer for layer in layers if is_within(name, layer)), None)) is not None:
            home, key = layer, name.removeprefix(f"{layer}.")
        if id(tensor) in shared:
            home, key = _first_holder(model, chunk.all_layers, tensor)
        homes.setdefault(home, {})[key] = tensor
    values: dict[int, Tensor] = {}
    for home, tensors in homes.items():
        copied, initialise = _with_memory(model.get_submodule(home), device), _initialiser(model, home, init)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for name, module in reversed([*copied.named_modules(prefix=home)]):
                _seed(zlib.crc32(f"{seed} {name}".encode()), device)  # of a seed torch uses 32 bits
                initialise(module)
        values.update({id(tensor): _get(copied, key) for key, tensor in tensors.items()})
    return values


def _seed(number: int, device: torch.device) -> None:
    """Of the generators that were forked: torch.manual_seed would leave those of other devices changed."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def _first_holder(model: nn.Module, layers: Sequence[str], parameter: Tensor) -> tuple[str, str]:
    """The first of some layers that has a parameter, else the first module, and the parameter's name in it."""
    named = ((layer, *pair) for layer in layers for pair in model.get_submodule(layer).named_parameters())
    beside = (("", *pair) for pair in model.named_parameters())
    home, name = next((layer, name) for layer, name, each in (*named, *beside) if each is parameter)
    return (home, name) if home else name.rpartition(".")[::2]


def _with_memory(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy with memory for what is on the meta device, and NaN for values: an initialiser may leave some out."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_meta:
            value = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return copy.deepcopy(module, memo)


def _draw_from_outside(model: Any, chunk: Chunk, names: Sequence[str]) -> None:
    """Values for buffers that the library sets in `_init_weights` of a model around them: Falcon-H1's multipliers."""
    twin = copy.deepcopy(model)  # on the meta device, except these
    found: dict[str, Tensor] = {}
    for name in names:
        prefix, _, key = name.rpartition(".")
        if key in twin.get_submodule(prefix)._buffers:
            found[name] = twin.get_submodule(prefix)._buffers[key] = torch.full_like(
                chunk.get_buffer(name), torch.nan, device="cpu"
            )
    for outer in {name.rsplit(".", count)[0] for name in found for count in range(1, name.count(".") + 1)}:
        if is_transformer(part := twin.get_submodule(outer)):
            part._init_weights(part)
    for name, buffer in found.items():
        chunk.get_buffer(name).copy_(buffer)


def _has_value(chunk: Chunk, name: str) -> bool:
    tensor = _get(chunk, name)
    as_made = not (tensor.is_floating_point() or tensor._version or tensor.any())
    return not (tensor.numel() and (as_made or tensor.flatten()[0].isnan()))


def _initialiser(model: nn.Module, name: str, init: Initialiser | None) -> Initialiser:
    """What sets the parameters of modules in a layer: of the library, the innermost model that has it, such as a vision
    tower, since no other knows its modules."""
    outer = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
    nearest: Any = next(filter(is_transformer, map(model.get_submodule, outer)), model)
    if init is None and is_transformer(nearest):
        return nearest._init_weights
    return init or _reset


def _reset(part: nn.Module) -> None:
    if callable(reset := getattr(part, "reset_parameters", None)):
        reset()


# ---- from files


def _load(chunk: Chunk, stored: dict[str, Any], where: str, device: torch.device, quantizer: Any) -> None:
    """Reads this chunk's tensors from the files of a folder, and no others."""
    converts = is_transformer(chunk.whole)
    if converts:
        _load_by_the_library(chunk, stored, where, device, quantizer)
    for name, tensor in [*chunk.named_parameters(remove_duplicate=False), *chunk.named_buffers()]:
        if name not in stored or (converts and not tensor.is_meta):  # the library reads no buffers of other chunks
            continue
        value = stored[name][...].to(device, tensor.dtype)
        if value.shape != tensor.shape:
            raise ValueError(f"cut: {name!r} is {list(tensor.shape)} in the model and {list(value.shape)} in {where}")
        _set(chunk, name, nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value)


def _with_tied_names(model: nn.Module, stored: dict[str, Any]) -> dict[str, Any]:
    """With a tied weight, which is stored once, under each of the names that the model has for it.

    In the files it may have a name that the library translates, or one without the prefix of a model with a head.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [each for each in names.values() if len(each) > 1]
    renamed = _names_by_the_library(model, stored) if tied and is_transformer(model) else {}
    prefix, found = f"{getattr(model, 'base_model_prefix', '')}.", {}
    for each in tied:
        known = (held for name in each for held in (name, name.removeprefix(prefix), renamed.get(name)))
        if (held := next((held for held in known if held in stored), None)) is not None:
            found.update(dict.fromkeys(each, stored[held]))
    return found | stored


def _stored(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Slices of all tensors of the folder, by name, which read nothing yet."""
    open_file = safetensors("cut").safe_open
    if (folder / INDEX).is_file():
        try:
            names = sorted({*json.loads((folder / INDEX).read_text())["weight_map"].values()})
            "".join(names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'cut: weights: {folder / INDEX} must have a "weight_map" of names of tensors to names of files; got '
                f"{type(error).__name__}: {error}"
            ) from error
        if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"cut: weights: {folder / INDEX} must name files of its own folder; got {outside[0]!r}")
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise ValueError(
            f"cut: weights must be a folder that holds {INDEX} or {SINGLE}; {folder} has neither: "
            "from_pretrained(folder).save_pretrained(other) writes them from other files"
        )
    stored = {}
    for name in names:
        if not (folder / name).is_file():  # a pipe would be waited for
            raise ValueError(f"cut: weights: cannot read {folder / name}: there is no such file")
        try:
            file = files.enter_context(open_file(folder / name, framework="pt"))
        except (OSError, safetensors("cut").SafetensorError) as error:
            raise ValueError(f"cut: weights: cannot read {folder / name}: {error}") from error
        stored.update({key: file.get_slice(key) for key in file.keys()})  # noqa: SIM118
    return stored


def _load_by_the_library(
    chunk: Chunk, stored: dict[str, Any], where: str, device: torch.device, quantizer: Any
) -> None:
    """With the names and layouts of other versions of the model, which the transformers library knows to convert; and
    as numbers where they are quantised."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Any = get_model_conversion_mapping(chunk.whole, hf_quantizer=quantizer)
    config = LoadStateDictConfig(device_map={"": device}, weight_mapping=mapping, hf_quantizer=quantizer)
    with _without_progress_bars():
        found, _ = convert_and_load_state_dict_in_model(chunk.whole, stored, config)
    if quantizer is not None:  # an export writes numbers
        chunk.whole._weight_conversions = get_model_conversion_mapping(chunk.whole)
    if found.mismatched_keys or found.conversion_errors:
        wrong = sorted(map(str, (*found.mismatched_keys, *found.conversion_errors.items())))
        raise ValueError(f"cut: {where} do not fit the model: {wrong[0]}")


def _names_by_the_library(whole: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """{name in the model: name in the files}, where the transformers library knows these by other names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    mapping: Any = get_model_conversion_mapping(whole)  # type: ignore[arg-type]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    return {rename_source_key(name, renamings, [])[0]: name for name in stored}


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def safetensors(caller: str) -> Any:
    """The library. Raises ImportError with what to install."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{caller}: needs the safetensors library: pip install safetensors") from error
    return safetensors
