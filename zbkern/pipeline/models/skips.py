"""Skips: outputs of layers that more than the next one uses, as a U-Net's: they are sent from chunk to chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zbkern.pipeline.transport.tensors import tensors_in


def last_users(caller: str, skips: Mapping[str, str] | None, names: Sequence[str]) -> dict[str, int]:
    """{layer: number of the last layer that uses its output}, of the argument `skips` of `cut`."""
    for name, last in (skips or {}).items():
        if name not in names or last not in names or names.index(name) >= names.index(last):
            raise ValueError(
                f"{caller}: skips must be {{layer: a later layer, the last one that uses its output}}; got "
                f"{{{name!r}: {last!r}}}, and the layers are {[*names]}"
            )
    return {name: names.index(last) for name, last in (skips or {}).items()}


class Skips:
    """Of a forward: what layers of this chunk give to later ones, and what it has received of earlier ones."""

    def __init__(self, received: Mapping[str, Any] | None) -> None:
        self._values: dict[str, Any] = {}
        self._versions: dict[str, list[Any]] = {}
        for name, value in (received or {}).items():
            self.keep(name, value)

    def keep(self, name: str, value: Any) -> None:
        """Of a layer, what it gives."""
        self._values[name] = value
        if not torch.compiler.is_compiling():
            self._versions[name] = [(each, each._version) for each in tensors_in(value) if not each.is_inference()]

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def of(self, names: Iterable[str]) -> dict[str, Any]:
        """What these layers have given, to be sent on."""
        for name in names:
            if name not in self._values:
                raise ValueError(
                    f"cut: layer {name!r} of skips must be called in every forward; it was not: leave it out"
                )
            if any(each._version != version for each, version in self._versions.get(name, ())):
                raise ValueError(
                    f"cut: what layer {name!r} gives must stay as it is, since it is in skips; it was changed in "
                    "place, which each chunk would do again: put an operation there that is not in place"
                )
        return {name: self._values[name] for name in names}
