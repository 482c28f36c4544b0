"""A stage for torch.distributed.pipelining whose W is our queue, for every stock schedule that splits the backward.

torch's own split walks the autograd graph; this stage runs one backward in which zbkern layers leave their W behind.
It uses the stage's public arguments and methods only (`dw_builder`, and the forward, B and W of one chunk).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

from zbkern.conversion.convert import convert
from zbkern.nn import Layer
from zbkern.wgrad import WGradQueue, accumulation


class PipelineStage(pipelining.PipelineStage):
    """torch's PipelineStage, with the same arguments, whose W waits.

    A submodule without any zbkern layer goes through `zbkern.convert`; one that has been converted, or a part of it,
    stays as it is. What is not a zbkern layer then keeps its whole backward in B. queue: where the W wait, a new
    WGradQueue when None; its keys are (stage_index, microbatch). Raises TypeError for a dw_builder: that is what this
    class is.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *arguments: Any,
        queue: WGradQueue | None = None,
        **options: Any,
    ) -> None:
        if "dw_builder" in options:
            raise TypeError("PipelineStage: dw_builder is taken by the queue; use torch's PipelineStage with your own")
        if isinstance(submodule, nn.Module) and not any(isinstance(part, Layer) for part in submodule.modules()):
            convert(submodule)
        self.queue = WGradQueue() if queue is None else queue
        self._runner: Callable[[], Any] = _nothing
        options["dw_builder"] = lambda: self._runner
        super().__init__(submodule, stage_index, num_stages, device, *arguments, **options)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """The forward of one microbatch, in which layers see that their W may wait: DTensors' and intercepted ones'."""
        with self.queue.defer((self.stage_index, fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """B of one microbatch, or B and W in one when full_backward."""
        reduces = isinstance(self.submod, DistributedDataParallel)
        if full_backward or not self.has_backward:
            self._runner = _nothing
            if reduces and last_backward:  # this backward reduces: W that wait must have run before
                self.queue.run(self._waiting())
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            return
        key = (self.stage_index, bwd_chunk_id)
        self._runner = functools.partial(self.queue.run, key)
        with self.queue.defer(key):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if reduces:
            for task in self.queue.tasks():  # the reducer hears of every parameter once, after the last W
                if task.key == key:
                    task.ddp_managed = False

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """W of one microbatch; after the last, DistributedDataParallel's reduction of all gradients."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if last_backward and self.has_backward and isinstance(self.submod, DistributedDataParallel):
            self.queue.run(self._waiting())
            parameters = [p for p in self.submod.parameters() if p.requires_grad]
            self.submod.reducer.prepare_for_backward([])
            accumulation.accumulate_via_autograd([(p, torch.zeros_like(p, requires_grad=False)) for p in parameters])

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """What the chunk before, on the same rank, takes as its gradients; nothing in `eval`, where stock fails."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Takes the gradients from the chunk behind, on the same rank; there are none in `eval`."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _waiting(self) -> list[Any]:
        keys = self.queue.keys()
        return [key for key in keys if key[0] == self.stage_index]


def _nothing() -> None:
    """The W of a backward that was not split."""
