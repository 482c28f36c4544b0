"""Whether the backward of a chunk runs a part of its forward again, as `torch.utils.checkpoint` does: it is then a
forward, too, and no other one of the chunk may run beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_nodes_made = torch._C._autograd._get_sequence_nr  # of graphs, in this thread


class Reruns:
    """found: None before the first backward, which decides. So all ranks of a group do as one: what a later one does
    may depend on a rank's own data."""

    def __init__(self, chunk: int) -> None:
        self.found: bool | None = None
        self._chunk, self._nodes, self._is_watched = chunk, 0, True

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Raises RuntimeError where a backward runs a forward again, and the first has not."""
        before = _nodes_made()
        if self._is_watched:
            with _Gradients() as watched:
                yield
            if self.found is False and watched.enabled:
                raise RuntimeError(
                    f"Pipeline: the backward of chunk {self._chunk} runs a part of its forward again "
                    "(torch.utils.checkpoint), as the first did not, so another forward of the chunk may have run "
                    "beside it; zero the gradients and repeat the step, or turn checkpoints on before the first step"
                )
            self.found = watched.enabled
        else:
            yield
        nodes = _nodes_made() - before
        self._nodes, self._is_watched = nodes, nodes != self._nodes  # it may be another backward than before


class _Gradients(TorchFunctionMode):
    """enabled: whether anything was computed with gradients enabled, which a backward does for no other reason."""

    enabled = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.enabled = self.enabled or torch.is_grad_enabled()
        return function(*args, **(kwargs or {}))
