"""Names by which ranks know copies of one weight: as a user gives them, or as a Pipeline has marked the copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def check_tied(caller: str, tied: Any) -> None:
    """Raises TypeError for what is not {name: parameter} or None."""
    named = isinstance(tied, Mapping) and all(isinstance(n, str) and isinstance(p, Tensor) for n, p in tied.items())
    if tied is not None and not named:
        raise TypeError(f'{caller}: tied must be {{name: parameter}}, as in {{"embedding": weight}}; got {tied!r}')


def tied_names(parameters: Iterable[Tensor], tied: Mapping[str, Tensor] | None) -> dict[int, str]:
    """{id: name} of those of the parameters that have copies: as `tied` says, or else as a Pipeline has marked them."""
    if tied is not None:
        return {id(parameter): name for name, parameter in tied.items()}
    return {id(parameter): parameter.tied_name for parameter in parameters if hasattr(parameter, "tied_name")}
