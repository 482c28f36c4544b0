"""What stands for CUDA graphs on a CPU: operations that are recorded once, and run again on the same memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zbkern.pipeline.runtime.graphs import GraphedStage
from zbkern.wgrad.storages import storage_key

_thread = threading.local()
_REFUSED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_aten = torch.ops.aten
_WRITES_IN_SILENCE = {_aten.native_batch_norm.default: (3, 4)}  # arguments that its schema does not mark


class RecordedGraphs:
    """As `CudaGraphs`. As there, nothing has happened after a capture: what it has written is as it was, and what it
    has made is not a number. After a replay what nobody held at the end of the capture is none, either: other graphs of
    the pool may have that memory. Refuses what a GPU would have to wait for."""

    device_type = "cpu"
    graphs = 0
    replays = 0

    def __init__(self, device: torch.device) -> None: ...

    def new_pool(self) -> Any:
        return []  # what graphs have made that somebody holds

    def capture(self, function: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
        random, recorder = torch.get_rng_state(), _Recorder()
        try:
            _thread.captures = True
            with recorder:
                result = function()
        finally:
            _thread.captures = False
            recorder.undo()
            torch.set_rng_state(random)
        recorder.leave(pool)
        RecordedGraphs.graphs += 1
        return result, recorder.replay


def install(monkeypatch: pytest.MonkeyPatch) -> type[RecordedGraphs]:
    """Has stages capture on the CPU, in this test. Returns what counts graphs and replays from now on."""
    monkeypatch.setattr(GraphedStage, "backend", RecordedGraphs)
    for name in ("tolist", "numpy"):  # which dispatch no operation
        monkeypatch.setattr(Tensor, name, _refused_in_capture(getattr(Tensor, name)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: getattr(_thread, "captures", False))
    RecordedGraphs.graphs = RecordedGraphs.replays = 0
    return RecordedGraphs


def _refused_in_capture(original: Any) -> Any:
    def call(*arguments: Any, **more: Any) -> Any:
        return _refuse() if getattr(_thread, "captures", False) else original(*arguments, **more)

    return call


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self._made: dict[int, Tensor] = {}  # by storage
        self._freed: list[Tensor] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: what is written, and a copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _REFUSED & {*func.tags} and not _indexes_by_numbers(func, args):
            _refuse()
        for tensor in _written(func, args, kwargs):
            key = storage_key(tensor)
            if key not in self._made and key not in self._before:
                self._before[key] = _whole(tensor), _whole(tensor).clone()
        found = func(*args, **kwargs)
        given = {storage_key(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs: list[Tensor | None] = []
        for leaf in pytree.tree_leaves(found):
            new = isinstance(leaf, Tensor) and storage_key(leaf) not in given
            outputs.append(_at_address(leaf) if new else None)
            if new:
                self._made.setdefault(storage_key(leaf), _whole(leaf))
        if any(output is not None for output in outputs) or _written(func, args, kwargs):
            args, kwargs = pytree.tree_map_only(Tensor, _at_address, (args, kwargs))
            self._calls.append((func, args, kwargs, outputs))
        return found

    def undo(self) -> None:
        for whole, copy in self._before.values():
            whole.copy_(copy)
        self._before.clear()
        _forget(self._made.values())

    def leave(self, pool: list[Tensor]) -> None:
        pool += self._made.values()
        self._made.clear()
        counts = [torch._C._storage_Use_Count(made.untyped_storage()._cdata) for made in pool]
        self._freed = [made for made, count in zip(pool, counts, strict=True) if count == 2]  # this, and who asks
        pool[:] = [made for made, count in zip(pool, counts, strict=True) if count > 2]

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # what was recorded has been cast
    def replay(self) -> None:
        RecordedGraphs.replays += 1
        for func, args, kwargs, outputs in self._calls:
            for output, leaf in zip(outputs, pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                if output is not None:
                    output.copy_(leaf)
        _forget(self._freed)


def _refuse(*_: Any) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def _forget(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's storage."""
    return tensor.data.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _at_address(tensor: Tensor) -> Tensor:
    """The tensor's memory, of which it keeps nothing alive, as a kernel's argument does not."""
    size = tensor.untyped_storage().nbytes()
    if not size:
        return tensor.data
    memory = (ctypes.c_char * size).from_address(tensor.untyped_storage().data_ptr())
    whole = torch.frombuffer(memory, dtype=tensor.dtype, count=size // tensor.element_size())
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    arguments = func._schema.arguments
    marked = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or index in _WRITES_IN_SILENCE.get(func, ())
    ]
    return [leaf for leaf in pytree.tree_leaves(marked) if isinstance(leaf, Tensor)]


def _indexes_by_numbers(func: Any, args: Any) -> bool:
    return func is _aten.index.Tensor and all(index is None or index.dtype != torch.bool for index in args[1])
