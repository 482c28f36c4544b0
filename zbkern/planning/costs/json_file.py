"""What all costs share that can be written as JSON: files, and errors for text that is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbkern.schedules.units import number

if TYPE_CHECKING:
    from typing_extensions import Self

_LARGEST = 16 * 2**20  # bytes: costs of 10,000 layers are 6 MB


class JsonFile:
    """A dataclass that is saved as a JSON object, and shown with four digits, without what is as by default."""

    def __repr__(self) -> str:
        ordered = sorted(fields(self), key=lambda field: bool(field.kw_only))  # type: ignore[arg-type]
        values = [(each, getattr(self, each.name)) for each in ordered]
        shown = [f"{each.name}={_shown(value)}" for each, value in values if value != each.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_json(self) -> str:
        """The JSON object with the fields' names."""
        return json.dumps(asdict(self), indent=1)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote; fields that are absent have their defaults.

        Raises TypeError for what is no text, ValueError for other text.
        """
        caller = f"{cls.__name__}.from_json"
        data = parse_object(caller, text, '{"forward": 1.0}')
        check_fields(caller, cls, data)
        return cls(**data)

    def save(self, path: str | Path) -> Path:
        """Writes the JSON file and returns its path."""
        path = Path(path)
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What is in a JSON file that `save` wrote, or that was written by hand. Raises OSError or ValueError."""
        return cls.from_json(read_text(path))


_MOST_SHOWN = 6  # of numbers after each other


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if not isinstance(value, tuple) or not value:
        return repr(value)
    if is_dataclass(value[0]):
        return f"<{len(value)} {type(value[0]).__name__}>"
    runs = [(_shown(each), len([*same])) for each, same in groupby(value)]
    parts = [text if count == 1 else f"{text} x {count}" for text, count in runs]
    more = f", and so on: {len(value)}" if len(parts) > _MOST_SHOWN else ""
    return f"({', '.join(parts[:_MOST_SHOWN])}{more})"


def read_text(path: str | Path) -> str:
    """The text of a file. Raises OSError, or ValueError for one that is larger than costs and configurations are."""
    with Path(path).open("rb") as file:
        data = file.read(_LARGEST + 1)  # no more of a device that has no end, such as /dev/zero
    if len(data) > _LARGEST:
        raise ValueError(f"{path} is larger than {_LARGEST >> 20} MiB, or has no end; give a JSON file")
    return data.decode("utf-8")


def parse_object(caller: str, text: str, example: str) -> Mapping[str, Any]:
    """The JSON object in a text. Raises ValueError for another text, in the name of `caller`."""
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{caller}: expected JSON of at most a few levels; got {text[:60]!r}...") from error
    except ValueError as error:  # numbers of thousands of digits, too
        raise ValueError(f"{caller}: expected JSON; got {text[:60]!r}: {error}") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{caller}: expected an object such as {example}; got {text[:60]!r}")
    return data


def check_fields(where: str, kind: Any, data: Any) -> None:
    """Raises ValueError for what is no object with fields of this dataclass, those without a default among them."""
    known = [field.name for field in fields(kind)]
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected an object with some of {known}; got {str(data)[:120]}")
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(f"{where}: unknown fields {unknown}; expected an object with some of {known}")
    if missing := [each.name for each in fields(kind) if each.default is MISSING and each.name not in data]:
        raise ValueError(f"{where}: {missing} are missing; got {sorted(data)}")
