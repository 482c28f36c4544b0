"""verl 0.9: an engine for its workers, whose model is cut over the ranks of a pipeline (docs/integrations.md#verl)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import (
    detach_tree,
    enable_full_determinism,
    postprocess_batch_func,
    prepare_micro_batches,
)

import zbkern
from zbkern import pipeline
from zbkern.integrations.verl_options import DTYPES, check_batch, check_local, check_options
from zbkern.integrations.verl_options import EngineConfig as EngineConfig
from zbkern.pipeline.batches import ends_of_pack


class PipelineEngine(BaseEngine):
    """A model of the transformers library in a pipeline, and replicas of it under DistributedDataParallel.

    model_config, engine_config, optimizer_config, checkpoint_config: verl's HFModelConfig, the `EngineConfig` here,
    its FSDPOptimizerConfig and its CheckpointConfig. torch.distributed is initialised. Raises ValueError for options
    that would be left out in silence.
    """

    model_class: str  # of the transformers library, by subclass

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: EngineConfig,
        optimizer_config: FSDPOptimizerConfig,
        checkpoint_config: CheckpointConfig,
    ) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        world, stages = dist.get_world_size(), engine_config.pipeline_parallel_size
        check_options(model_config, engine_config, world)
        if engine_config.full_determinism:
            enable_full_determinism(engine_config.seed)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self.mesh = dist.init_device_mesh(kind, (world // stages, stages), mesh_dim_names=("replica", "stage"))
        self.make_schedule = partial(getattr(pipeline.schedules, engine_config.schedule), stages)
        self.schedule = self.make_schedule(stages)  # of which only the places of the chunks count
        self.mode: str | None = None
        self.pipe: Any = None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.loss = _Loss(self.model_output)
        self._saved: list[str] = []

    def initialize(self) -> None:
        """Reads this rank's chunks from the model's folder, and makes the optimizer; on every rank."""
        import transformers

        if self.pipe is not None:
            self.pipe.close()
        config, options = self.model_config, self.engine_config
        kind = getattr(transformers, self.model_class)
        with torch.device("meta"):
            model = kind.from_config(config.hf_config, trust_remote_code=config.trust_remote_code)
        if config.enable_gradient_checkpointing and not options.forward_only:
            model.gradient_checkpointing_enable()
        stage = self.mesh["stage"]
        rank, folder = stage.get_local_rank(), config.local_path
        chunks: list[Any] = pipeline.cut(model, self.schedule, weights=folder, rank=rank, device=self.device)
        dtype = DTYPES[options.dtype]
        chunks = [zbkern.convert(chunk.to(dtype).requires_grad_(not options.forward_only)) for chunk in chunks]
        if self.get_data_parallel_size() > 1 and not options.forward_only:
            group = self.get_data_parallel_group()
            chunks = [nn.parallel.DistributedDataParallel(chunk, process_group=group) for chunk in chunks]
        step = pipeline.StepOptions(same_bits=options.full_determinism)
        self.pipe = pipeline.Pipeline(chunks, self.schedule, self.loss, stage.get_group(), self.device, options=step)
        if options.forward_only:
            self._leave()
            return
        inner = build_optimizer(nn.ModuleList(chunks).parameters(), self.optimizer_config)
        self.optimizer = pipeline.Optimizer(
            inner,
            self.pipe,
            max_norm=self.optimizer_config.clip_grad,
            master_weights=dtype != torch.float32,
            undo=None,  # `optimizer_step` waits for the norm of all ranks anyway
        )
        self.lr_scheduler = _lr_scheduler(self.optimizer, self.optimizer_config)
        self._leave()

    # ---- what verl asks of the ranks

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload and self.optimizer is not None

    def get_data_parallel_rank(self) -> int:
        return self.mesh.get_local_rank("replica")

    def get_data_parallel_size(self) -> int:
        return self.mesh.size(0)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("replica")

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank has the last chunk of its pipeline, and so the losses."""
        return self.schedule.placement[-1] == self.mesh.get_local_rank("stage")

    # ---- a step

    def train_mode(self, **options: Any) -> _Mode:
        return _Mode(self, "train", **options)

    def eval_mode(self, **options: Any) -> _Mode:
        return _Mode(self, "eval", **options)

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Returns the norm of all gradients before clipping; a step whose norm is not finite is skipped."""
        self.optimizer.step()
        self.optimizer.validate()
        return self.optimizer.last_norm

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return self.lr_scheduler.get_last_lr()[0]

    def forward_backward_batch(self, data: Any, loss_function: Callable | None, forward_only: bool = False) -> Any:
        """verl's outputs of the batch on the rank of `is_mp_src_rank_with_outputs`, empty ones on others; collective.

        Gradients are those of the sum of the micro-batches' losses, meaned over replicas.
        """
        check_batch(data)
        tokens = data["loss_mask"].sum().to(self.device)
        dist.all_reduce(tokens, group=self.get_data_parallel_group())
        about = {"batch_num_tokens": tokens.item(), "dp_size": self.get_data_parallel_size(), "sp_size": 1}
        tensordict_utils.assign_non_tensor(data, **about)
        rows, schedule = self._planned(data)
        parts = [tensordict_utils.index_select_tensor_dict(data, row).to(self.device) for row in rows]
        inputs, side = zip(*map(_inputs, parts), strict=True)
        call = self.pipe.forward if forward_only else self.pipe.step
        self.loss.begin(parts, loss_function, self.get_data_parallel_group())
        call([*inputs], [*range(len(parts))], [*side], schedule=schedule)
        outputs = self.loss.end()
        if not forward_only and not tensordict_utils.get_non_tensor_data(data, "return_model_output", False):
            for output in outputs:
                del output["model_output"]
        tensordict_utils.assign_non_tensor(data, use_dynamic_bsz=True)  # outputs go back to the order of the batch
        return postprocess_batch_func(outputs, rows, data)

    def _planned(self, data: Any) -> tuple[list[list[int]], Any]:
        """The sequences of each micro-batch, and their schedule."""
        options, stages = self.engine_config, self.engine_config.pipeline_parallel_size
        if options.costs is not None:
            lengths = data["input_ids"].offsets().diff().tolist()
            how = {"placement": self.schedule.placement, "memory_limit": options.memory_limit}
            plan = pipeline.plan_batch(lengths, pipeline.Costs(**options.costs), stages, **how)
            return [[*row] for row in plan.rows], plan.schedule
        group = tensordict_utils.get_non_tensor_data(data, "force_group_size", 1)
        fewest = min(len(data) // group, 2 * stages)  # fewer than two for each stage leave bubbles that no W fills
        parts, rows = prepare_micro_batches(data, same_micro_num_in_dp=False, min_num_micro_batch=fewest)
        if rows is None:
            ends = [*accumulate(map(len, parts), initial=0)]
            rows = [[*range(first, last)] for first, last in pairwise(ends)]
        return rows, self.make_schedule(len(rows))

    def model_output(self, output: Any, part: Any) -> dict[str, Tensor]:
        """What verl's losses take of a micro-batch: nested tensors of its sequences."""
        raise NotImplementedError

    # ---- weights and states between steps

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """(name, tensor) of the whole model, with the names of its files, on every rank, which reads to the end."""
        self._return()
        return pipeline.full_weights(self.pipe), None

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves weights, or gradients and the optimizer's states, to "cpu" or to the device of this rank."""
        super().to(device, model, optimizer, grad)
        away = device == "cpu"
        if optimizer and self.optimizer is not None:  # gradients go with the states
            if away:
                self.optimizer.offload_states()
            else:
                self.optimizer.reload_states()
        if model:
            for module in self.pipe.modules.values():
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.data = tensor.data.to("cpu" if away else self.device)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Into a folder that all ranks share; with "hf_model" in `save_contents` also what `from_pretrained` reads."""
        check_local(hdfs_path)
        contents = self.checkpoint_config.save_contents
        self._return()
        if "model" in contents:
            optimizer = self.optimizer if "optimizer" in contents else None
            extra = self.lr_scheduler.state_dict() if "extra" in contents and self.lr_scheduler is not None else None
            pipeline.checkpoint.save(local_path, global_step, self.pipe, optimizer, extra)
        if "hf_model" in contents:
            pipeline.export(f"{local_path}/huggingface", self.pipe)
            if dist.get_rank() == 0 and self.model_config.tokenizer is not None:
                self.model_config.tokenizer.save_pretrained(f"{local_path}/huggingface")
        self._leave()
        self._saved.append(local_path)
        if max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            oldest = self._saved.pop(0)
            if dist.get_rank() == 0:
                shutil.rmtree(oldest, ignore_errors=True)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        """As verl's own engines, leaves everything as it is where there is no path. The folder stays.

        Raises FileNotFoundError for a folder without a checkpoint.
        """
        check_local(hdfs_path)
        if local_path is None:
            return
        contents = self.checkpoint_config.load_contents
        self._return()
        found = pipeline.checkpoint.load(local_path, self.pipe, self.optimizer if "optimizer" in contents else None)
        if found is None:
            raise FileNotFoundError(
                f"PipelineEngine.load_checkpoint: local_path must have a checkpoint that save_checkpoint wrote; got "
                f"{local_path!r}"
            )
        if "extra" in contents and found.extra is not None and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(found.extra)
        self._leave()

    def _return(self) -> None:
        if self.is_param_offload_enabled:
            self.to(self.device.type, optimizer=False, grad=False)

    def _leave(self) -> None:
        model = self.is_param_offload_enabled
        self.to("cpu", model=model, optimizer=self.is_optimizer_offload_enabled, grad=model)


@EngineRegistry.register(model_type="language_model", backend="zbkern", device=["cuda", "cpu"])
class PipelineEngineWithLMHead(PipelineEngine):
    """Of an actor and its reference: log-probabilities and entropy of tokens, without whole logits."""

    model_class = "AutoModelForCausalLM"

    def model_output(self, output: Any, part: Any) -> dict[str, Tensor]:
        tokens, ends = part["input_ids"].values(), part["input_ids"].offsets()
        following = tokens.roll(-1)
        following[ends[1:] - 1] = -100  # of a sequence's last token nothing follows
        logits = _cooled(output, tensordict_utils.get_non_tensor_data(part, "temperature", 1.0), ends)
        # the entropy is computed with it in any case: log-probabilities have the same bits with it and without
        log_probs, entropy = pipeline.token_log_probs(logits, following[None])
        found = {"log_probs": log_probs, "entropy": entropy}
        if not tensordict_utils.get_non_tensor_data(part, "calculate_entropy", False):
            del found["entropy"]
        return {name: torch.nested.nested_tensor_from_jagged(each[0], ends) for name, each in found.items()}


@EngineRegistry.register(model_type="value_model", backend="zbkern", device=["cuda", "cpu"])
class PipelineEngineWithValueHead(PipelineEngine):
    """Of a critic, whose folder has the weights of a model of one label for each token."""

    model_class = "AutoModelForTokenClassification"

    def initialize(self) -> None:
        self.model_config.hf_config.num_labels = 1
        self.model_config.hf_config.classifier_dropout = 0.0
        super().initialize()

    def model_output(self, output: Any, part: Any) -> dict[str, Tensor]:
        values = getattr(output, "logits", output)[0, :, 0]
        return {"values": torch.nested.nested_tensor_from_jagged(values, part["input_ids"].offsets())}


class _Mode(BaseEngineCtx):
    """Training or evaluation, with what is offloaded on the device meanwhile; gradients are cleared behind training."""

    def __enter__(self) -> None:
        super().__enter__()
        for module in self.engine.pipe.modules.values():
            module.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or error is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


class _Loss:
    """`loss_fn` of the Pipeline: verl's, of one micro-batch, whose number is the target."""

    _takes_packs = takes_deferred_logits = True

    def __init__(self, model_output: Callable[[Any, Any], dict[str, Tensor]]) -> None:
        self._model_output = model_output
        self._parts: Sequence[Any] = ()
        self._function: Callable | None = None
        self._group: dist.ProcessGroup | None = None
        self._found: dict[int, dict[str, Any]] = {}

    def begin(self, parts: Sequence[Any], function: Callable | None, group: dist.ProcessGroup) -> None:
        self._parts, self._function, self._group, self._found = parts, function, group, {}

    def end(self) -> list[dict[str, Any]]:
        """What verl takes of every micro-batch, in order; none but on the rank of the last chunk."""
        found, self._found, self._parts = self._found, {}, ()
        return [{**output, "loss": output["loss"].item()} for _, output in sorted(found.items())]

    def __call__(self, output: Any, number: int) -> Tensor:
        part = self._parts[number]
        model_output = self._model_output(output, part)
        loss, metrics = torch.ones((), device=part.device), {}
        if self._function is not None:
            loss, metrics = self._function(model_output=model_output, data=part, dp_group=self._group)
        self._found[number] = {"model_output": detach_tree(model_output), "loss": loss.detach(), "metrics": metrics}
        return loss * len(self._parts)  # the Pipeline takes the mean over microbatches, verl the sum


def _inputs(part: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A row without padding of the micro-batch's sequences, and where these end."""
    ends = part["input_ids"].offsets().tolist()
    inputs = {name: part[name].values()[None] for name in ("input_ids", "position_ids")}
    return inputs, ends_of_pack(ends, inputs["input_ids"].device) if len(ends) > 2 else {}


def _cooled(logits: Any, temperature: Tensor | float, ends: Tensor) -> Any:
    """Logits by the temperature of the micro-batch, or of each of its sequences."""
    if not isinstance(temperature, Tensor):
        if temperature == 1:
            return logits
        temperature = torch.full((len(ends) - 1,), float(temperature), device=ends.device)
    each = temperature.to(ends.device, torch.float32).repeat_interleave(ends.diff())[None, :, None]
    if not isinstance(logits, pipeline.DeferredLogits):
        return logits / each.to(logits.dtype)
    if logits.softcap is not None:
        raise ValueError(
            "PipelineEngine: temperature must be 1 for a model with a softcap on its logits, which are not computed as "
            "a whole; got another one"
        )
    hidden = logits.hidden / each.to(logits.hidden.dtype)
    return pipeline.DeferredLogits(hidden, logits.head, logits.autocast, logits.scale, None, logits.slices)


def _lr_scheduler(optimizer: Any, config: FSDPOptimizerConfig) -> Any:
    steps, warmup = config.total_training_steps, config.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * steps)
    if config.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup)
    return get_cosine_schedule_with_warmup(
        optimizer,
        warmup,
        steps,
        min_lr_ratio=config.min_lr_ratio or 0.0,
        num_cycles=config.num_cycles,
        zero_indexed_step=config.zero_indexed_step,
    )
