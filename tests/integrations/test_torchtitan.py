"""torchtitan itself over gloo, with the stages that the page's line makes: gradients are those of the whole model."""

from __future__ import annotations

import hashlib
import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.needs import installed
from tests.support.programs import block

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
MICROBATCHES, LENGTH, VOCABULARY, LAYERS, EXPERTS = 4, 16, 2048, 4, 16
pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    needed = "spmd_types==0.2.3", "torchao==0.18.*", "torchdata", "torch_checkpointing", "tyro", "einops"
    return installed(tmp_path_factory, "torchtitan", "torchtitan==0.3.*", *needed, "docstring-parser", "typeguard")


def prepare(folder: str) -> None:
    """torchtitan on a CPU, in this process, with experts' products in float32, which it casts to bfloat16."""
    warnings.simplefilter("ignore")
    if folder not in sys.path:
        sys.path.append(folder)
    data, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")  # nothing here loads any data
    data.Dataset = data.load_dataset = distributed.split_dataset_by_node = object
    sys.modules.update({"datasets": data, "datasets.distributed": distributed})
    import torchtitan.tools.utils
    from torchtitan.distributed import fsdp, parallel_dims
    from torchtitan.models.common.attention import ScaledDotProductAttention

    parallel_dims.device_type = torchtitan.tools.utils.device_type = "cpu"
    fsdp.disable_fsdp_gradient_division = lambda model: None  # gloo has no sum with a factor: gradients are means
    ScaledDotProductAttention.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]
    torch.Tensor.bfloat16 = lambda self: self


def specification(name: str) -> Any:
    """torchtitan's debug model of this name, of few layers and experts, attention for a CPU, head and input untied."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    module = importlib.import_module(f"torchtitan.models.{name.removesuffix('_moe')}")
    spec = module.model_registry("debugmodel_moe" if name.endswith("_moe") else "debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:LAYERS]
    for layer in spec.model.layers:
        if isinstance(layer.attention.inner_attention, FlexAttention.Config):
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope.max_seq_len = 64
        if getattr(layer, "moe", None) is not None:
            router, routed = layer.moe.router, layer.moe.routed_experts
            experts = min(router.num_experts, EXPERTS)  # qwen3 has 64, and a compiler makes code for each
            for part in (layer.moe, router, routed.inner_experts, routed.token_dispatcher):
                part.num_experts = experts
            router.gate.out_features = experts
    if getattr(spec.model, "enable_weight_tying", False):
        spec.model.enable_weight_tying = False
    return spec


def build(spec: Any, parallelism: Any, training: Any) -> Any:
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=training, debug=None))
    with torch.device("meta"):
        return spec.model.build()


def own_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def fill(model: Any, shapes: dict[str, torch.Size]) -> None:
    """The same values under the same names, whatever part of the model this is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        for name, parameter in model.named_parameters():
            shape = shapes[own_name(name)]
            seed = int(hashlib.md5(own_name(name).encode()).hexdigest()[:8], 16)
            value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            value = 1 + 0.1 * value if value.dim() == 1 else value * 0.7 / shape[-1] ** 0.5
            sharded = isinstance(parameter, DTensor)
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements) if sharded else value)


def loss_fn(y: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    from torchtitan.components.loss import cross_entropy_loss

    return cross_entropy_loss(y, labels) / (MICROBATCHES * LENGTH), {}


def whole(name: str, training: Any, tokens: torch.Tensor) -> dict[str, torch.nn.Parameter]:
    """The parameters of the whole model in this process, with its gradients for all rows of tokens."""
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")
    model = build(specification(name), ParallelismConfig(spmd_backend="partial_dtensor"), training)
    fill(model, {name: parameter.shape for name, parameter in model.named_parameters()})
    for row in tokens.flatten(0, 1).split(1):
        loss_fn(model(row[:, :-1], positions=torch.arange(LENGTH).expand(1, -1)), row[:, 1:])[0].backward()
    return dict(model.named_parameters())


def step(folder: str, name: str, schedule: str, tensor: int, data: int, checkpoint: bool, compiled: bool) -> int:
    """A step of torchtitan's pipeline beside the whole model; returns how many bytes of W waited on this rank."""
    prepare(folder)
    from torch.distributed.tensor import DTensor
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    exec(block(PAGE, "pipeline_parallel.PipelineStage = PipelineStage"), {})
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=2,
        tensor_parallel_degree=tensor,
        data_parallel_shard_degree=data,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_microbatch_size=1,
        spmd_backend="partial_dtensor",
    )
    fp32 = {"mixed_precision_param": "float32", "mixed_precision_reduce": "float32"}
    training = TrainingConfig(local_batch_size=MICROBATCHES, seq_len=LENGTH, **fp32)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (data, MICROBATCHES, LENGTH + 1), generator=generator)
    expected = whole(name, training, tokens)

    dims = ParallelDims.from_config(parallelism, torch.distributed.get_world_size())
    dims.build_mesh()
    spec = specification(name)
    pipeline, parts, first, last = spec.pipelining_fn(
        build(spec, parallelism, training),
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=compiled, components=["model"]),
        ac_config=SelectiveAC.Config() if checkpoint else None,
        dump_folder=".",
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=loss_fn,
    )
    for part in parts:
        fill(part, {name: parameter.shape for name, parameter in expected.items()})
    own = tokens[dims.get_mesh("fsdp").get_local_rank() if data > 1 else 0]
    inputs, labels = own[:, :-1], {"target": own[:, 1:].contiguous(), "losses": []}
    with utils.get_spmd_context(parallel_dims=dims)():
        positions = torch.arange(LENGTH).expand(MICROBATCHES, -1).contiguous()
        pipeline.step(*[inputs] * first, positions=positions, **labels if last else {})
    for part in parts:
        for name, parameter in part.named_parameters():
            found, want = parameter.grad, expected[own_name(name)].grad
            found = (found.full_tensor() if isinstance(found, DTensor) else found) * data
            assert want.abs().max() > 0, name
            assert (found - want).abs().max() <= 2e-5 * want.abs().max(), name
    return sum(stage.queue.peak_bytes for stage in pipeline._stages)


V = "ZBVZeroBubble"
# model, schedule, ranks of a stage, replicas, whether layers are checkpointed, and compiled
ALONE: dict[str, tuple[Any, ...]] = {
    "a V": ("llama3", V, 1, 1, False, False),
    "interleaved": ("llama3", "InterleavedZeroBubble", 1, 1, False, False),
    "experts beside each other": ("qwen3_moe", "DualPipeV", 1, 1, False, False),
    # compiled experts are torch's own _grouped_mm, which traces bf16 alone: these models are float32 here
    "checkpointed and compiled": ("llama3", V, 1, 1, True, True),
    "checkpointed": ("deepseek_v3", V, 1, 1, True, False),
}
SIDE_BY_SIDE: dict[str, tuple[Any, ...]] = {
    "tensor-parallel": ("qwen3", V, 2, 1, False, False),  # torch's own stages are wrong there with experts
    "dense under FSDP2": ("llama3", V, 1, 2, False, False),
    "experts under FSDP2": ("qwen3_moe", V, 1, 2, False, False),
    "latent attention under FSDP2": ("deepseek_v3", V, 1, 2, False, False),
}


@pytest.mark.parametrize("cases", [ALONE, SIDE_BY_SIDE], ids=["two ranks", "four ranks"])
def test_steps_are_those_of_the_whole_model(
    request: pytest.FixtureRequest, package: str, cases: dict[str, tuple[Any, ...]]
) -> None:
    ranks = request.getfixturevalue("fresh_ranks" if cases is ALONE else "four_ranks")
    found = ranks.run_each(step, {name: (package, *case) for name, case in cases.items()}, timeout=400)
    assert all(min(waiting) > 0 for waiting in found.values()), found
