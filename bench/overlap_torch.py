"""torch's ScheduleDualPipeV with its pairs beside each other, for bench.overlap.

torch runs F and B of a pair one after the other, unless it is given a function that does otherwise. This one has two
threads that take turns where a collective is in flight, as zbkern's passes do: what differs is the engine around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import FORWARD, OVERLAP_F_B, ScheduleDualPipeV

from zbkern.pipeline.runtime.overlap.passes import Passes


class TorchPairs:
    """Steps of two chunks of a V on each rank of a group. loss_fn: of an output and a target."""

    def __init__(
        self, chunks: Sequence[nn.Module], microbatches: int, x: Tensor, loss_fn: Callable[..., Tensor], group: Any
    ) -> None:
        rank, last = group.rank(), 2 * group.size() - 1
        between = x.detach().clone().requires_grad_()  # what a stage is given, and what it gives
        self._stages = [
            PipelineStage(chunk, number, last + 1, x.device, between if number else x, between, group=group)
            for chunk, number in zip(chunks, (rank, last - rank), strict=True)
        ]
        self._is_first = rank == 0

        def share(output: Tensor, target: Tensor) -> Tensor:
            return loss_fn(output, target) / microbatches

        self._schedule = ScheduleDualPipeV(self._stages, microbatches, share, scale_grads=False)  # type: ignore[arg-type]
        self._schedule.register_custom_function(OVERLAP_F_B, self._pair)
        self._passes = Passes(x.device)

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        if self._is_first:  # a V ends where it begins
            self._schedule.step(torch.cat([*inputs]), target=torch.cat([*targets]), losses=[], return_outputs=False)
        else:
            self._schedule.step()

    def close(self) -> None:
        self._passes.close()

    def _pair(self, action: Any, context: Any) -> None:
        self._wait_for_inputs(action.sub_actions)
        runs = [
            partial(self._forward if each.computation_type is FORWARD else self._backward, each, context)
            for each in action.sub_actions
        ]
        self._passes.run(runs, [0])

    def _wait_for_inputs(self, actions: Sequence[Any]) -> None:
        for each in actions:
            key = each.stage_index, each.microbatch_index
            pending = self._schedule.fwd_recv_ops if each.computation_type is FORWARD else self._schedule.bwd_recv_ops
            for work in pending.pop(key, ()):
                work.wait()

    def _stage(self, number: int) -> Any:
        return next((stage for stage in self._stages if stage.stage_index == number), None)

    def _forward(self, action: Any, context: Any) -> None:
        number, stage = action.microbatch_index, self._stage(action.stage_index)
        output = stage.forward_one_chunk(
            number, context.arg_mbs[number], context.kwarg_mbs[number], save_forward_output=False
        )
        self._schedule._maybe_compute_loss(stage, output, context.target_mbs, number, None)
        if (behind := self._stage(action.stage_index + 1)) is not None:
            behind.set_local_fwd_input(output, number)

    def _backward(self, action: Any, context: Any) -> None:
        number, stage = action.microbatch_index, self._stage(action.stage_index)
        loss = self._schedule._maybe_get_loss(stage, number)
        self._schedule.backward_counter[action.stage_index] += 1
        stage.backward_one_chunk(number, loss=loss, full_backward=True, last_backward=False)
        if (before := self._stage(action.stage_index - 1)) is not None:
            before.set_local_bwd_input(stage.get_local_bwd_output(number), number)
