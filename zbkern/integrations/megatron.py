"""Megatron-core: its tensor-parallel linears with a W that waits, its training step run by a zbkern schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.utils import get_model_config
from torch import Tensor

from zbkern import functional
from zbkern.conversion import convert as conversion
from zbkern.integrations import transformer_engine
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.schedules.schedule import Schedule

LINEARS = (layers.ColumnParallelLinear, layers.RowParallelLinear)


def convert(model: torch.nn.Module | Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Changes Megatron's model chunks in place, so that every W can wait in a zbkern queue; returns them as a list.

    ColumnParallelLinear and RowParallelLinear keep their class, their weights and their collectives; their product
    becomes `zbkern.functional.linear`, and `zbkern.convert` sees to all other modules. W is added to `main_grad`
    wherever a weight has one, so that gradient_accumulation_fusion changes nothing. TransformerEngine's layers made
    with delay_wgrad_compute=True leave their W there, too; others of its layers compute it in B. Before or after
    Megatron's DistributedDataParallel wraps a chunk. Raises ValueError with defer_embedding_wgrad_compute, and for
    linears that gather their weights from a gtp_remat group.
    """
    chunks: list[Any] = [model] if isinstance(model, torch.nn.Module) else [*model]
    for chunk in chunks:
        conversion.convert(chunk, filter=lambda _, module: not isinstance(module, LINEARS))
        if any(map(transformer_engine.delays, chunk.modules())):
            transformer_engine.use_queue(chunk)
        for module in chunk.modules():
            if isinstance(module, LINEARS):
                if module.config.defer_embedding_wgrad_compute:
                    raise ValueError(
                        "zbkern.integrations.megatron.convert: defer_embedding_wgrad_compute must be False: the W of "
                        "the output layer waits in the queue like any other; got True"
                    )
                if getattr(module, "gtp_remat_size", 1) > 1:
                    raise ValueError(
                        "zbkern.integrations.megatron.convert: linears must have whole weights, and not shards that "
                        f"Megatron gathers for each pass; got a gtp_remat_size of {module.gtp_remat_size}"
                    )
                module._forward_impl = _linear
    return chunks


def _linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **_: Any,
) -> Tensor:
    """What Megatron calls its linear with: the collectives of the forward and of B, around a product with its own W."""
    if sequence_parallel:
        input = mappings.gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = mappings.copy_to_tensor_model_parallel_region(input, group=tp_group)
    return functional.linear(input, weight, bias)


class ForwardBackward:
    """Megatron's `forward_backward_func` for one schedule: called with its arguments, returns what it returns.

    schedule: of as many ranks as Megatron's pipeline and as many chunks per rank as it has virtual stages, with chunk i
    on rank i % ranks, as Megatron places them. fill, options: those of `zbkern.pipeline.Pipeline`, which is made for
    the model of the first call and kept as `pipeline` for later ones. Data parallelism is Megatron's: gradients are
    reduced in the order of its config's finalize_model_grads_func, after the last W. Raises ValueError for a schedule
    that Megatron's placement does not fit, or that recomputes, offloads, or cuts sequences.
    """

    def __init__(self, schedule: Schedule, *, fill: str = "planned", options: StepOptions | None = None) -> None:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if schedule.placement != tuple(i % stages for i in range(stages * schedule.chunks)):
            raise ValueError(
                f"ForwardBackward: schedule must have chunk i on rank i % {stages}, where Megatron has it; got "
                f"placement {schedule.placement} of {schedule.name}"
            )
        kinds = {action.kind for row in schedule.actions for action in row} - {"F", "B", "W", "BW"}
        if kinds or schedule.is_sliced:
            raise ValueError(
                f"ForwardBackward: schedule must have F, B, W and BW of whole sequences alone, since Megatron "
                f"recomputes and offloads itself; got {sorted(kinds) or schedule.slices}"
            )
        self.schedule, self.fill, self.options = schedule, fill, options
        self.pipeline: Pipeline | None = None
        self._parts: list[_Chunk] = []

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
        first_val_step: bool | None = None,
        force_all_reduce: bool = False,
        **unused: Any,
    ) -> list[Any]:
        """What `forward_step_func`'s losses return for logging, by microbatch, on the last chunk's rank; [] elsewhere.

        seq_length and micro_batch_size are not needed: tensors travel with their shapes. Other arguments of Megatron's
        are not supported. Raises ValueError where num_microbatches is not the schedule's.
        """
        chunks: list[Any] = [model] if isinstance(model, torch.nn.Module) else [*model]
        if num_microbatches != self.schedule.microbatches:
            raise ValueError(
                f"ForwardBackward: num_microbatches must be {self.schedule.microbatches} as in the schedule; got "
                f"{num_microbatches}"
            )
        if given := sorted(name for name, value in unused.items() if value):
            raise ValueError(f"ForwardBackward: {', '.join(given)} must be left out: it is not supported")
        pipeline, store = self._pipeline(chunks), list[Any]()
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        for part, iterator in zip(self._parts, iterators, strict=True):
            first = not (forward_only and first_val_step is False)
            part.begin(forward_step_func, iterator, num_microbatches, store, first)
        numbers = [torch.zeros(1)] * num_microbatches  # each chunk reads its batch from its iterator
        if forward_only:
            pipeline.evaluate(numbers, numbers)
            return store
        with contextlib.ExitStack() as stack:
            for chunk in chunks:
                if hasattr(chunk, "no_sync"):
                    stack.enter_context(chunk.no_sync())
            pipeline.step(numbers, numbers)
        tokens = torch.stack([part.tokens for part in self._parts]).sum().to(pipeline.device)
        self._finalize(chunks, tokens, force_all_reduce)
        return store

    def close(self) -> None:
        """Ends the pipeline's connections; on every rank."""
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None

    def _pipeline(self, chunks: list[Any]) -> Pipeline:
        if self.pipeline is None or [part.model for part in self._parts] != chunks:
            self.close()
            group = parallel_state.get_pipeline_model_parallel_group()
            owned = self.schedule.chunks_of(parallel_state.get_pipeline_model_parallel_rank())
            self._parts = parts = [_Chunk(c, i, self.schedule) for i, c in zip(owned, chunks, strict=True)]
            scaled = parts[-1].scaled
            self.pipeline = Pipeline(parts, self.schedule, scaled, group, fill=self.fill, options=self.options)
        return self.pipeline

    def _finalize(self, chunks: list[Any], tokens: Tensor, force_all_reduce: bool) -> None:
        config = get_model_config(chunks[0])
        for chunk in chunks:
            if getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False):
                chunk.start_grad_sync()
        if config.finalize_model_grads_func is not None:
            per_token = tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(chunks, per_token, force_all_reduce=force_all_reduce)


class _Chunk(torch.nn.Module):
    """A model chunk of Megatron's as a function of the tensor before it: hidden states, or on the last the loss."""

    def __init__(self, model: Any, chunk: int, schedule: Schedule) -> None:
        super().__init__()
        self.model, self.config = model, get_model_config(model)
        self.first, self.last = chunk == 0, chunk == len(schedule.placement) - 1

    def begin(self, step: Any, iterator: Any, microbatches: int, store: list[Any], first: bool) -> None:
        """The arguments of this call of `ForwardBackward`."""
        self.arguments = (step, iterator, self.model, microbatches)
        self.store, self.is_first_step, self.microbatch, self.tokens = store, first, 0, torch.tensor(0)

    def forward(self, x: Tensor) -> Tensor:
        output, tokens = megatron_schedules.forward_step(
            *self.arguments,
            None if self.first else x,
            self.store,
            self.config,
            parallel_state.get_context_parallel_world_size(),
            is_first_microbatch=self.is_first_step and self.microbatch == 0,
            current_microbatch=self.microbatch,
            is_last_stage=self.last,
        )
        self.microbatch += 1
        self.tokens = self.tokens + tokens
        return output

    def scaled(self, loss: Tensor, _: Tensor) -> Tensor:
        """The loss of a microbatch: Megatron has divided it by their number, and the pipeline will again."""
        if self.config.grad_scale_func is not None:
            loss = self.config.grad_scale_func(loss)
        return loss * self.arguments[-1]
