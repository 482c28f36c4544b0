"""A model's configuration, the config.json that the transformers library writes with it, read by typed questions.

What the file leaves out is read from the library's own configuration of that model type, where it is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_MOST_COUNTED = 10_000  # layers, heads, experts: each of them is worked on
_LARGEST = 10**8  # of sizes


@dataclass(frozen=True)
class Family:
    """What is known of the models of one model_type, a row of families.json; the defaults are as in most.

    names: of embedding, blocks and norm. norms: of a block. parallel: as in `Block`. gated: MLPs are. hidden: the name
    of their size. experts: in some layers. clamped: gate and up of these. mixed: layers of several kinds, also without
    a window. alone: a layer is attention or MLP or what is in the place of one. latent: attention. output_gate: on
    attention's output. state_space: names of heads, their size, states, groups, kernel and chunk.
    """

    names: tuple[str, str, str] = ("model.embed_tokens", "model.layers", "model.norm")
    norms: int = 2
    parallel: bool = False
    gated: bool = True
    hidden: str = "intermediate_size"
    experts: bool = False
    clamped: bool = False
    mixed: bool = False
    alone: bool = False
    latent: bool = False
    output_gate: bool = False
    state_space: tuple[str, ...] = ()


def _family(row: dict[str, Any]) -> Family:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Family(**fields)


FAMILIES: dict[str, Family] = {
    kind: _family(row)
    for kind, row in json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8")).items()
}
"""Those that are known, by model_type."""


@dataclass(frozen=True)
class Configuration:
    """What a file says of a decoder; errors are ValueErrors that name what is missing or wrong.

    said_of: its own names and values. partial: the file leaves out what is the default of the library's class, as for
    the text part of a larger model. left_out: parts of such a model that are not planned for.
    """

    kind: str
    said_of: Mapping[str, Any]
    partial: bool
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, whole: Mapping[str, Any]) -> Configuration:
        """The decoder's in the contents of a file, which may be of a model that also takes images."""
        text = whole.get("text_config")
        own = dict(text if isinstance(text, Mapping) else whole)
        kind = own.get("model_type")
        if kind not in [*FAMILIES]:
            raise ValueError(
                f"architecture: model_type must be that of a decoder that is known; got {kind!r}, known are "
                + ", ".join(FAMILIES)
                + "; for another model, write its layers' costs (ModelCosts.save) and give them as --costs"
            )
        if own.get("layer_types", ()) is None:  # which says that the library works them out
            del own["layer_types"]
        if "tie_word_embeddings" in whole:
            own["tie_word_embeddings"] = bool(whole["tie_word_embeddings"])
        parts = [name for name, value in whole.items() if name.endswith("_config") and isinstance(value, Mapping)]
        left_out = tuple(name for name in parts if name not in ("text_config", "quantization_config"))
        return cls(kind, own, isinstance(text, Mapping), left_out)

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    @cached_property
    def library(self) -> Any:
        """The library's configuration with the file's contents; None where it is not installed."""
        try:
            from transformers import CONFIG_MAPPING
        except ImportError:
            return None
        for name, value in self.said_of.items():  # before the library makes as many layers
            if type(value) is int and name.startswith(("num_", "n_", "hidden_size")):
                _check(name, value, 0)
        plain = {name: value for name, value in self.said_of.items() if "{" not in str(value)}  # not its infinities
        try:
            return CONFIG_MAPPING[self.kind].from_dict(plain)
        except Exception as error:  # of its own kinds, for what it does not take
            raise ValueError(f"architecture: the transformers library does not take it: {error}") from error

    def said(self, name: str) -> Any:
        """What the file itself says; None where it does not."""
        return self.said_of.get(name)

    def value(self, name: str) -> Any:
        """What the file says, or what the library has for it; None where neither does, or the library is missing."""
        return self.said_of[name] if name in self.said_of else getattr(self.library, name, None)

    def number(self, *names: str, least: int = 1) -> int:
        """A whole number: the first of these names that the file has, else that the library has."""
        there = (name for value in (self.said, self.value) for name in names if value(name))
        name = next(there, names[0])
        return _check(name, self.value(name), least)

    def numbers(self, *names: str) -> list[int]:
        """One for each of these names."""
        return [self.number(name) for name in names]

    def optional(self, name: str, default: int = 0) -> int:
        """default where the name is missing, null or 0."""
        value = self.value(name) if self.partial else self.said(name)
        return _check(name, value, 1) if value else default

    def flag(self, name: str) -> bool:
        """Whether something is so, which is not taken for false where neither file nor library says it."""
        return bool(self._known(name))

    def entries(self, name: str) -> Sequence[Any]:
        """A list; empty where it is null, or where neither the file nor the library has it."""
        value = self._known(name) or []
        if not isinstance(value, list):
            raise ValueError(f"architecture: {name} must be a list; got {value!r}")
        return value

    def _known(self, name: str) -> Any:
        value = self.value(name)
        if value is None and self.library is None:
            raise ValueError(
                f"architecture: {name} is not in the file, which leaves out defaults: write it, or install "
                "transformers, whose configuration knows"
            )
        return value


def _check(name: str, value: Any, least: int) -> int:
    most = _MOST_COUNTED if name.startswith("num_") or name.endswith(("_experts", "_group", "_layer")) else _LARGEST
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        bounds = f"at least {least} and at most {most:,}"
        raise ValueError(f"architecture: {name} must be a whole number, {bounds}; got {repr(value)[:60]}")
    return value
