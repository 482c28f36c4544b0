"""What all costs share that can be written as JSON: files, and errors for text that is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class JsonFile:
    """Saves what `to_json` writes and `from_json` reads."""

    def to_json(self) -> str:
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Self:
        raise NotImplementedError

    def save(self, path: str | Path) -> Path:
        """Writes the JSON file and returns its path."""
        path = Path(path)
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What is in a JSON file that `save` wrote, or that was written by hand. Raises OSError or ValueError."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def parse_object(kind: str, text: str, example: str) -> Mapping[str, Any]:
    """The JSON object in a text, for the class of that name. Raises TypeError for no text, ValueError for others."""
    caller = f"{kind}.from_json"
    if not isinstance(text, str):
        raise TypeError(
            f"{caller}: expected the text itself, as Path(file).read_text() gives it; got "
            f"{type(text).__name__} {text!r}"
        )
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{caller}: expected JSON; got {text[:60]!r}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{caller}: expected JSON of at most a few levels; got {text[:60]!r}...") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{caller}: expected an object such as {example}; got {text[:60]!r}")
    return data
