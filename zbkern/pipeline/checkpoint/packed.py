"""Values that are no tensors as tensors of bytes, which are read without running anybody's code."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def pack(value: Any, what: str) -> Tensor:
    """Numbers, strings, tensors, and tuples, lists and dicts of them as a tensor of bytes, uint8 [n].

    what: its name in errors. Raises TypeError for what `unpack` would refuse: a checkpoint that cannot be read would
    take the place of one that can.
    """
    buffer = io.BytesIO()
    try:
        torch.save(pytree.tree_map(_plain, value), buffer)
        packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        unpack(packed)
    except Exception as error:
        for path, leaf in pytree.tree_leaves_with_path(value):
            if path:
                pack(leaf, f"{what}{pytree.keystr(path)}")
        raise TypeError(
            f"checkpoint.save: {what} must be a number, a string, a tensor, or a tuple, list or dict of them, which "
            f"are read without running anybody's code; got {type(value).__name__}"
        ) from error
    return packed


def digest(value: Any) -> str:
    """The same for equal values of what `pack` takes, on any rank."""
    found = hashlib.sha256()
    leaves = {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(value)}
    for path, leaf in sorted(leaves.items()):
        data = (
            bytes(pack(leaf.detach().cpu(), path).tolist()) if isinstance(leaf, Tensor) else repr(_plain(leaf)).encode()
        )
        found.update(path.encode() + data)
    return found.hexdigest()


def _plain(leaf: Any) -> Any:
    """A number of numpy, such as a learning rate from a cosine, as Python's."""
    return leaf.item() if type(leaf).__module__ == "numpy" and not getattr(leaf, "shape", None) else leaf


def unpack(packed: Tensor) -> Any:
    """What was packed: numbers, strings, tensors, and tuples, lists and dicts of them."""
    data = bytearray(packed.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(packed)
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
