"""A checkpoint that is not what was written: every flipped bit is found or changes nothing, and no file runs code."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.checkpointed import assert_same, state_by_name
from zbkern.pipeline import checkpoint


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(state_by_name([module], optimizer))


def flips(path: Path, count: int | None, seed: int) -> Iterator[str]:
    """Flips single bits of a file, all of them or `count` drawn ones, one at a time."""
    whole = path.read_bytes()
    bits = range(8 * len(whole))
    for bit in bits if count is None else random.Random(seed).sample(bits, min(count, len(bits))):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        yield f"bit {bit}"
    path.write_bytes(whole)


def check_flips(folder: Path, name: str, count: int | None, seed: int) -> None:
    """Loads after each flip: an error that names the file and changes nothing, or exactly what was saved."""
    module, optimizer = make()
    path = checkpoint.save(folder, 1, module, optimizer, {"position": 3})
    expected = state_of(module, optimizer)
    raised = 0
    for place in flips(path / name, count, seed):
        again, other = make(1)
        before, message = state_of(again, other), ""
        try:
            found = checkpoint.load(folder, again, other)
        except ValueError as error:
            message, raised = str(error), raised + 1
        if message:
            assert name in message, place
            assert_same(before, state_of(again, other))
        else:
            assert found == (1, {"position": 3}), place
            assert_same(expected, state_of(again, other))
    assert (raised > 0) == (name != ".metadata")


@pytest.mark.parametrize("count", [80, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["__0_0.distcp", "zbkern.json", ".metadata"])
def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path: Path, name: str, count: int) -> None:
    check_flips(tmp_path, name, count, seed=count)


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    module, _ = make()
    path = checkpoint.save(tmp_path, 1, module)
    entry = json.loads((path / "zbkern.json").read_text())["content"]["tensors"]["model.bias"]["pieces"][0]
    file, start, length = entry[2:5]
    whole = (path / file).read_bytes()
    (path / file).write_bytes(whole[:start] + bytes(length) + whole[start + length :])
    with pytest.raises(ValueError, match=r"'model.bias' in .*__0_0.distcp is damaged: its checksum"):
        checkpoint.load(tmp_path, module)
    (path / file).write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.load(tmp_path, module)
    (path / file).unlink()
    with pytest.raises(ValueError, match=r"__0_0.distcp was deleted while it was read, or is lost"):
        checkpoint.load(tmp_path, module)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"content": 3, "crc32": 1}', b'{"crc32": []}', b"null"],
)
def test_an_index_that_is_none_is_damaged(tmp_path: Path, content: bytes) -> None:
    module, _ = make()
    path = checkpoint.save(tmp_path, 1, module)
    (path / "zbkern.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"zbkern.json is damaged"):
        checkpoint.load(tmp_path, module)


def test_an_index_of_another_version_or_place_is_refused(tmp_path: Path) -> None:
    module, _ = make()
    path = checkpoint.save(tmp_path, 1, module) / "zbkern.json"
    content = json.loads(path.read_text())["content"]

    def write(content: Any) -> None:
        crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        path.write_text(json.dumps({"crc32": crc32, "content": content}))

    write({**content, "version": 1})
    with pytest.raises(ValueError, match="its version is 1, this zbkern reads 2"):
        checkpoint.load(tmp_path, module)
    content["tensors"]["model.weight"]["pieces"][0][2] = "../other"
    write(content)
    with pytest.raises(ValueError, match=r"'model.weight' is said to be in '../other'"):
        checkpoint.load(tmp_path, module)


class Code:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_file_of_a_checkpoint_runs_code(tmp_path: Path) -> None:
    """Written by somebody who can compute checksums, too."""
    folder, trace = tmp_path / "run", tmp_path / "trace"
    module, optimizer = make()
    path = checkpoint.save(folder, 1, module, optimizer)
    code = pickle.dumps(Code(trace))
    (path / ".metadata").write_bytes(code)
    assert checkpoint.load(folder, module, optimizer) == (1, None)
    index = json.loads((path / "zbkern.json").read_text())
    as_zip = tmp_path / "zip"
    torch.save(Code(trace), as_zip)
    for data in (code, as_zip.read_bytes()):
        for tensor in index["content"]["tensors"].values():
            tensor["pieces"][0][2:] = ["__0_0.distcp", 0, len(data), zlib.crc32(data)]
        crc32 = zlib.crc32(json.dumps(index["content"], sort_keys=True).encode())
        (path / "zbkern.json").write_text(json.dumps({"crc32": crc32, "content": index["content"]}))
        (path / "__0_0.distcp").write_bytes(data)
        with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights"):
            checkpoint.load(folder, module, optimizer)
    assert not trace.exists()
    pickle.loads(code)
    assert trace.exists(), "the code was none"


def test_torchs_tools_read_a_checkpoint(tmp_path: Path) -> None:
    module, optimizer = make()
    path = checkpoint.save(tmp_path / "run", 1, module, optimizer)
    wanted = {f"model.{key}": torch.zeros_like(value) for key, value in module.state_dict().items()}
    dcp.load(wanted, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(wanted[f"model.{key}"], value) for key, value in module.state_dict().items())
    dcp_to_torch_save(path, tmp_path / "whole")
    whole = torch.load(tmp_path / "whole", weights_only=True)
    assert torch.equal(whole["model.weight"], module.weight)
    assert torch.equal(whole["optimizer.exp_avg.weight"], optimizer.state[module.weight]["exp_avg"])
