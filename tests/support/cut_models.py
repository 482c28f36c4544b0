"""What is true of the chunks of any model that `cut` has cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.small_models import transformers
from zbkern.pipeline import Schedule, checkpoint, cut, export, schedules
from zbkern.pipeline.models.placeholders import Placeholder

load_file = pytest.importorskip("safetensors.torch").load_file
ALONE = schedules.one_f_one_b(1, 1)


def state_of(chunks: Any) -> dict[str, Tensor]:
    """Of all chunks, no two of which have a tensor."""
    state: dict[str, Tensor] = {}
    for chunk in chunks:
        assert not state.keys() & chunk.state_dict().keys(), "a tensor is in two chunks"
        state |= chunk.state_dict()
    return state


def every_chunk(config: Any, schedule: Schedule, partition: Any, **how: Any) -> list[nn.Module]:
    """In the model's order."""
    found = {}
    for rank in range(schedule.ranks):
        mine = cut(config, schedule, partition, rank=rank, **how)
        found |= dict(zip(schedule.chunks_of(rank), mine, strict=True))
    return [found[number] for number in sorted(found)]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name].to(value))] == []


def check_files_and_names(
    folder: Path, kind: type, chunks: Sequence[nn.Module], schedule: Schedule, partition: Any
) -> None:
    """Chunks, in the model's order, are written as the library writes a model of that kind, for it and for `cut`; what
    is saved of them and what is drawn for them does not depend on the partition."""
    state = state_of(chunks)
    export(folder / "exported", chunks)
    whole = kind.from_pretrained(folder / "exported", dtype=torch.float64)  # type: ignore[attr-defined]
    again = {**whole.state_dict(), **dict(whole.named_buffers())}
    assert whole.state_dict().keys() == state.keys()
    assert_equal({name: again[name] for name in state}, state)
    config = transformers.AutoConfig.from_pretrained(folder / "exported")  # names the class, with its head
    for chunk in every_chunk(config, schedule, partition, weights=folder / "exported"):
        held = {**dict(chunk.named_buffers()), **chunk.state_dict()}
        here = {name: value for name, value in held.items() if not isinstance(value, Placeholder)}
        assert_equal(here, {name: again[name] for name in here})
    drawn = cut(config, ALONE, rank=0, seed=3)
    assert_equal(state_of(every_chunk(config, schedule, partition, seed=3)), state_of(drawn))
    checkpoint.save(folder / "saved", 1, dict(enumerate(chunks)))
    checkpoint.load(folder / "saved", {0: drawn[0]})
    assert_equal(drawn[0].state_dict(), state)


def written(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's files."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
