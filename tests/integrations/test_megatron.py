"""Megatron-core itself on two CPU ranks over gloo: every W waits, and gradients are those of its own schedules."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import zbkern
from tests.support.needs import installed
from tests.support.programs import block
from tests.support.transformer_engine import Linear
from zbkern.pipeline import StepOptions, schedules

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
VOCABULARY, LENGTH, BATCH, LAYERS, MICROBATCHES = 64, 16, 2, 4, 4
pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    return installed(tmp_path_factory, "megatron", "megatron-core==0.16.*")


class OnCPU(TorchFunctionMode):
    """Megatron asks for tensors on CUDA by name."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class NoRandomState:
    """Stands for Megatron's states of CUDA's random numbers; nothing here draws any."""

    def fork(self, *names: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


def norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
    """Megatron's wrapper of torch's norm, for sequence parallelism, too, which it leaves to TransformerEngine's."""
    made = torch.nn.RMSNorm(hidden_size, eps=eps)
    made.weight.sequence_parallel = config.sequence_parallel
    return made


@contextlib.contextmanager
def megatron(folder: str, **sizes: Any) -> Iterator[None]:
    """Megatron's process groups of these sizes, on a CPU; for a process that runs nothing else."""
    warnings.simplefilter("ignore")
    if folder not in sys.path:
        sys.path.append(folder)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    moe_utils.te_general_gemm = None  # 0.16.1 forgets the name where there is no TransformerEngine
    WrappedTorchNorm.__new__ = norm
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = NoRandomState(), True
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    parallel_state.initialize_model_parallel(**sizes)
    try:
        with OnCPU():
            yield
    finally:
        parallel_state.destroy_model_parallel()


def build(tied: bool = False, overlap: bool = False, sharded: bool = False, **config: Any) -> list[Any]:
    """This rank's chunks of a small GPT in Megatron's DistributedDataParallel, the same for the same arguments."""
    from megatron.core import parallel_state as state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    virtual = state.get_virtual_pipeline_model_parallel_world_size()
    made = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=virtual is not None,  # without it, ranks send each other two tensors of one batch
        batch_p2p_comm=virtual is None,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
        **config,
    )
    chunks = []
    for index in range(virtual or 1):
        stage = index if virtual else None
        gpt = GPTModel(
            config=made,
            transformer_layer_spec=get_gpt_layer_local_spec(made.num_moe_experts, normalization="RMSNorm"),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            vp_stage=stage,
        )
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, use_distributed_optimizer=sharded
        )
        chunks.append(DistributedDataParallel(made, options, gpt))
    return chunks


def batches() -> Iterator[tuple[torch.Tensor, ...]]:
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forward_step(iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(iterator)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    output = model(tokens, torch.arange(LENGTH).expand(BATCH, LENGTH), mask, labels=labels)

    def loss_func(output: torch.Tensor) -> tuple[Any, ...]:
        loss = output.mean()
        if model.config.calculate_per_token_loss:
            return output.sum(), torch.tensor(output.numel(), dtype=torch.int), {"lm loss": loss.item()}
        return loss, {"lm loss": loss.item()}

    return output, loss_func


def compare(chunks: list[Any], plain: list[Any]) -> None:
    for chunk, other in zip(chunks, plain, strict=True):
        expected = dict(other.named_parameters())
        for name, parameter in chunk.named_parameters():
            want = expected[name].main_grad
            assert want.abs().max() > 0, name
            assert (parameter.main_grad - want).abs().max() <= 1e-6 * want.abs().max(), name


def arguments(model: list[Any]) -> dict[str, Any]:
    single = len(model) == 1
    return {
        "forward_step_func": forward_step,
        "data_iterator": batches() if single else [batches() for _ in model],
        "model": model,
        "num_microbatches": MICROBATCHES,
        "seq_length": LENGTH,
        "micro_batch_size": BATCH,
    }


def step_by_schedule(folder: str, name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Two steps of a schedule beside two of Megatron's own for these process groups, and one forward only."""
    with megatron(folder, **sizes):
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        plain, model = build(**options), build(**options)
        own, stages = get_forward_backward_func(), parallel_state.get_pipeline_model_parallel_world_size()
        names = {"model": model, "stages": stages, "microbatches": MICROBATCHES, "schedule_name": name}
        names |= {"forward_step": forward_step, "sequence_length": LENGTH, "batch_size": BATCH}
        for step in range(2):
            for chunk in plain + model:
                chunk.zero_grad_buffer()
            losses = own(**arguments(plain))
            names["data_iterator"] = arguments(model)["data_iterator"]
            if step == 0:
                exec(block(PAGE, "ForwardBackward("), names)
            else:
                names["losses"] = names["forward_backward_func"](**arguments(model))
            assert len(losses) == len(names["losses"])
            for want, got in zip(losses, names["losses"], strict=True):
                assert got["lm loss"] == pytest.approx(want["lm loss"], rel=1e-6)
            compare(model, plain)
        assert names["forward_backward_func"](**arguments(model), forward_only=True) == names["losses"]
        with pytest.raises(ValueError, match=r"num_microbatches must be 4"):
            names["forward_backward_func"](**arguments(model) | {"num_microbatches": 3})
        names["forward_backward_func"].close()


STAGES = {"pipeline_model_parallel_size": 2}
CHUNKS = STAGES | {"virtual_pipeline_model_parallel_size": 2}
MIXTURE = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "add_bias_linear": False}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "zb_h1": ("zb_h1", STAGES, {}),
    "tied": ("zb_h1", STAGES, {"tied": True}),
    "per-token loss": ("zb_h1", STAGES, {"calculate_per_token_loss": True}),
    "interleaved zb": ("interleaved_zero_bubble", CHUNKS, {}),
    "interleaved": ("interleaved", CHUNKS, {}),
    "1F1B": ("one_f_one_b", STAGES, {}),
    "experts": ("zb_h1", STAGES, MIXTURE),
    "data-parallel, overlap": ("zb_h1", {}, {"overlap": True}),
    "sharded": ("zb_h1", {}, {"overlap": True, "sharded": True}),
    "sequence-parallel": ("zb_h1", {"tensor_model_parallel_size": 2}, {"sequence_parallel": True, "tied": True}),
}


def test_a_schedule_gives_megatrons_gradients(fresh_ranks: Any, package: str) -> None:
    fresh_ranks.run_each(step_by_schedule, {name: (package, *case) for name, case in CASES.items()})


def step_eagerly(folder: str) -> int:
    with megatron(folder, pipeline_model_parallel_size=2):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from zbkern.integrations.megatron import ForwardBackward, convert

        plain, model = build(), convert(build())
        schedule, options = schedules.zb_h1(stages=2, microbatches=MICROBATCHES), StepOptions(record=True)
        eagerly = ForwardBackward(schedule, fill="eager", options=options)
        for chunk in plain + model:
            chunk.zero_grad_buffer()
        get_forward_backward_func()(**arguments(plain))
        eagerly(**arguments(model))
        compare(model, plain)
        samples = eagerly.pipeline.last.samples
        eagerly.close()
        return len(samples)


def every_weight_waits(folder: str, options: dict[str, Any]) -> None:
    with megatron(folder, tensor_model_parallel_size=2):
        from zbkern.integrations.megatron import convert

        (model,) = convert(build(**options))
        queue = zbkern.WGradQueue()
        with queue.defer():
            output, loss_func = forward_step(batches(), model)
            loss_func(output)[0].backward()
        early = [name for name, p in model.named_parameters() if p.grad is not None or p.main_grad.any()]
        assert all(name.endswith(".bias") for name in early), early
        queue.run()
        assert all(p.main_grad.any() for p in model.parameters())


def layers_of_transformer_engine(folder: str) -> tuple[int, bool]:
    with megatron(folder, pipeline_model_parallel_size=2):
        from zbkern.integrations.megatron import convert

        layer, queue = Linear(4, 4, bias=True), zbkern.WGradQueue()
        convert(torch.nn.Sequential(layer))
        with queue.defer():
            layer(torch.randn(3, 4)).sum().backward()
        waiting = queue.pending()
        queue.run()
        return waiting, layer.weight.grad is not None


def refusals(folder: str) -> None:
    with megatron(folder, pipeline_model_parallel_size=2):
        from zbkern.integrations.megatron import LINEARS, ForwardBackward, convert

        (chunk,) = build()
        next(module for module in chunk.modules() if isinstance(module, LINEARS)).gtp_remat_size = 2
        with pytest.raises(ValueError, match=r"must have whole weights.* gtp_remat_size of 2"):
            convert(chunk)
        with pytest.raises(ValueError, match=r"chunk i on rank i % 2.*\(0, 1, 1, 0\) of zb_v"):
            ForwardBackward(schedules.zb_v(stages=2, microbatches=4))


def test_what_waits_and_what_is_refused(fresh_ranks: Any, package: str) -> None:
    cases = {str(options): (package, options) for options in ({}, {"tied": True}, {"sequence_parallel": True})}
    fresh_ranks.run_each(every_weight_waits, cases)
    actions = 3 * MICROBATCHES
    assert min(fresh_ranks.run(step_eagerly, package)) > actions  # a W in several parts
    assert fresh_ranks.run(layers_of_transformer_engine, package) == [(1, True)] * 2
    fresh_ranks.run(refusals, package)  # of placements and shards that do not fit
