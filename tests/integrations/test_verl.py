"""verl's own TrainingWorker over gloo: with the pipeline's engine it trains what it does with verl's FSDP2 engine."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.programs import blocks, save_model
from tests.support.ranks import Ranks

WHY = "needs verl 0.9, with what its workers import (ray, uvicorn, fastapi): pip install verl uvicorn fastapi"
pytest.importorskip("verl", reason=WHY)

pytestmark = [pytest.mark.slow, pytest.mark.dist]

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
VOCABULARY, TIMEOUT = 13, 400
COSTS = {"forward": 2.0, "backward": 3.5, "weight": 1.0, "overhead": 0.01, "tokens": 64}
COSTS |= {"attention_forward": 1.0, "attention_backward": 2.5}


def use_cpu() -> None:
    """verl has no platform of CPUs alone; without a GPU it would take CUDA."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Device(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_, **__: (1, 1) if name == "mem_get_info" else 0

    class OnCPU(PlatformCUDA):
        device_name, device_module = "cpu", Device("cpu")

        def current_device(self) -> Any:
            return "cpu"

        def communication_backend_name(self) -> str:
            return "gloo"

    set_platform(OnCPU())


def batch(rows: slice = slice(None), longest: int = 9) -> Any:
    """8 prompts with answers, as PPO has them: padded on both sides, and then verl's nested tensors."""
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, 6, (8,), generator=generator).tolist()
    answers = [longest, *torch.randint(2, min(longest, 60) + 1, (7,), generator=generator).tolist()]
    tokens = torch.randint(1, VOCABULARY, (8, 5 + longest), generator=generator)
    place = torch.arange(5 + longest) - 5
    mask = torch.stack([(place >= -size) & (place < answer) for size, answer in zip(sizes, answers, strict=True)])
    mask, tokens = mask.long(), tokens * mask
    response = mask[:, 5:]
    of_answers = {
        name: torch.randn(8, longest, generator=generator) * response for name in ("advantages", "old", "ref")
    }
    tensors = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response,
        "prompts": tokens[:, :5].clone(),
        "responses": tokens[:, 5:].clone(),
        "advantages": of_answers["advantages"],
        "old_log_probs": -of_answers["old"].abs(),
        "ref_log_prob": -of_answers["ref"].abs(),
    }
    about = {"temperature": 0.7, "global_batch_size": 8, "calculate_entropy": True}
    tensors = {name: tensor[rows] for name, tensor in tensors.items()}
    return left_right_2_no_padding(tensordict_utils.get_tensordict(tensors, about))


def worker(
    folder: str, strategy: str, model_type: str = "language_model", optimizer: str = "AdamW", **options: Any
) -> Any:
    """verl's TrainingWorker with an engine that has read its model."""
    use_cpu()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        ActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    config: Any = FSDPEngineConfig
    options = {"max_token_len_per_gpu": 30, "infer_max_token_len_per_gpu": 30, **options}
    environment = {"MASTER_ADDR": "", "MASTER_PORT": "", "LOCAL_RANK": "0"}
    if strategy == "fsdp2":
        import trl
        import verl.workers.engine.fsdp.transformer_impl as fsdp

        fsdp.get_device_id = lambda: "cpu"
        trl.AutoModelForCausalLMWithValueHead = getattr(trl, "AutoModelForCausalLMWithValueHead", Ranks)  # of old ones
        environment["VERL_ENGINE_DEVICE"] = "cuda"  # for which it is registered
        options |= {"use_torch_compile": False, "mixed_precision": {"param_dtype": "fp32"}}
    else:
        from zbkern.integrations.verl import EngineConfig as config

        options = {"dtype": "float32", **options}
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment, "RANK": str(rank), "WORLD_SIZE": str(size)}.items():
            patch.setenv(name, value or os.environ.get(name, value))
        made = TrainingWorker(
            TrainingWorkerConfig(
                model_type=model_type,
                model_config=HFModelConfig(
                    path=folder,
                    override_config={"attn_implementation": "eager"},
                    enable_gradient_checkpointing=strategy == "zbkern" and "costs" not in options,
                    use_remove_padding=strategy == "zbkern",  # of others it needs flash-attn
                ),
                engine_config=config(strategy=strategy, **options),
                optimizer_config=FSDPOptimizerConfig(
                    optimizer=optimizer,
                    lr=1e-2 if optimizer == "AdamW" else 0.5,
                    total_training_steps=4,
                    clip_grad=0.5,
                    lr_scheduler_type="cosine",
                    min_lr_ratio=0.1,
                ),
                checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
            )
        )
    made.reset()
    actor = ActorConfig(
        strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_kl_loss=True, entropy_coeff=0.01
    )
    made.set_loss_fn(partial(ppo_loss, config=actor))
    return made


def weights(made: Any) -> dict[str, torch.Tensor]:
    found = made.engine.get_per_tensor_param()[0]
    return {name: getattr(value, "full_tensor", value.clone)().float().clone() for name, value in found}


def step(made: Any, data: Any) -> dict[str, Any]:
    """The step's loss, norm and rate, and all metrics of micro-batches; of ranks that have them."""
    from verl.utils import tensordict_utils

    tensordict_utils.assign_non_tensor(data, update_lr_scheduler=True)
    output = made.train_batch(data)
    return {} if output is None else tensordict_utils.get(output, "metrics")


def train(
    folder: str, strategy: str, longest: int, stages: int, more: dict[str, Any], temperatures: bool = False
) -> dict[str, Any]:
    """What a rank has after log-probabilities and two steps."""
    options = {**more, "pipeline_parallel_size": stages} if stages else {**more}
    options["optimizer"] = "SGD"  # AdamW makes of a gradient's last bits, where it is almost 0, a step of lr
    made = worker(folder, strategy, max_token_len_per_gpu=30 if longest < 30 else 700, **options)
    replica, replicas = made.engine.get_data_parallel_rank(), made.engine.get_data_parallel_size()
    if not stages:
        replica, replicas = 0, 1
    found: dict[str, Any] = {"replica": replica}
    data = [batch(slice(replica, None, replicas), longest) for _ in range(3)]
    for each in data if temperatures else ():
        each["temperature"] = torch.arange(1, 9)[replica::replicas] / 4
    before = made.infer_batch(data[0])
    if before is not None:
        found["log_probs"], found["entropy"] = (
            [row[-answer.numel() - 1 : -1] for row, answer in zip(before[name].unbind(), answers, strict=True)]
            for name in ("log_probs", "entropy")
            for answers in [
                [
                    tokens[mask.bool()]
                    for tokens, mask in zip(data[0]["responses"], data[0]["response_mask"], strict=True)
                ]
            ]
        )
    metrics = [step(made, each) for each in data[1:]]
    found["steps"] = [{name: each[name] for name in ("loss", "grad_norm", "lr")} for each in metrics if each]
    found["weights"] = weights(made)
    if strategy == "zbkern":
        found["sliced"] = made.engine.pipe.schedule.is_sliced
        made.engine.pipe.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "tied")
    save_model(folder / "untied", tied=False)
    return folder


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


Case = tuple[str, int, int, int, dict[str, Any], bool]
CASES: dict[str, Case] = {
    "one stage": ("tied", 9, 1, 1, {}, False),
    "two stages": ("untied", 9, 2, 1, {}, False),
    "tied weights": ("tied", 9, 2, 1, {"schedule": "zb_h1"}, False),
    "a temperature of each row": ("untied", 9, 2, 1, {}, True),
    "micro-batches of a size": ("untied", 9, 2, 1, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}, False),
    "planned batches": ("untied", 600, 2, 1, {"costs": COSTS}, False),
    "offloaded": ("untied", 9, 2, 1, {"param_offload": True, "optimizer_offload": True}, False),
    "two replicas": ("untied", 9, 2, 2, {}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_workers_train_as_with_verls_own_engine(
    name: str, folder: Path, one_rank: Ranks, two_ranks: Any, four_ranks: Any
) -> None:
    model, longest, stages, replicas, more, temperatures = CASES[name]
    if "use_dynamic_bsz" in more:  # verl's own infer_batch reads another option for these
        more = {**more, "infer_micro_batch_size_per_gpu": 2}
    path = str(folder / model)
    infer = {"infer_max_token_len_per_gpu": 700} if longest > 30 else {}
    (want,) = one_rank.run(train, path, "fsdp2", longest, 0, infer, temperatures, timeout=TIMEOUT)
    ranks = {1: one_rank, 2: two_ranks, 4: four_ranks}[stages * replicas]
    found = ranks.run(train, path, "zbkern", longest, stages, more, temperatures, timeout=TIMEOUT)
    outputs = [each for each in found if "log_probs" in each]
    assert [each["replica"] for each in outputs] == [*range(replicas)]
    for each in outputs:
        for kind in ("log_probs", "entropy"):
            torch.testing.assert_close(each[kind], want[kind][each["replica"] :: replicas], rtol=1e-5, atol=1e-5)
        assert [*map(sorted, each["steps"])] == [*map(sorted, want["steps"])]
        for got, expected in zip(each["steps"], want["steps"], strict=True):
            assert got == pytest.approx(expected, rel=2e-5, abs=1e-6)
    want["weights"].pop("lm_head.weight" if model == "tied" else "", None)  # files have a tied weight once
    for each in found:
        torch.testing.assert_close(each["weights"], want["weights"], rtol=1e-4, atol=1e-5)
    assert all(each["sliced"] for each in found) is (name == "planned batches")


def resume(folder: str, out: str, stages: int) -> tuple[Any, ...]:
    """Steps go on from a checkpoint as without an end; what older ones there are is deleted."""
    made = worker(folder, "zbkern", pipeline_parallel_size=stages)
    for number in range(3):
        made.save_checkpoint(f"{out}/{number}", global_step=number, max_ckpt_to_keep=2)
        expected = step(made, batch())
    want = weights(made)
    made.engine.pipe.close()
    again = worker(folder, "zbkern", pipeline_parallel_size=stages)
    again.load_checkpoint(f"{out}/2")
    again.load_checkpoint(None)
    found = step(again, batch())
    got = weights(again)
    with pytest.raises(Exception, match="must have a checkpoint"):
        again.load_checkpoint(f"{out}/none")
    with pytest.raises(ValueError, match="hdfs_path must be None"):
        again.save_checkpoint(out, hdfs_path="hdfs://there")
    again.engine.pipe.close()
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
    return [(each["loss"], each["grad_norm"], each["lr"]) for each in (expected, found) if each], len(want)


def test_checkpoints_go_on_to_the_bit(folder: Path, two_ranks: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    results = two_ranks.run(resume, str(folder / "untied"), str(tmp_path), 2, timeout=TIMEOUT)
    ((one, other),) = [steps for steps, _ in results if steps]
    assert one == other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "2" / "huggingface")


def ratios(folder: str, stages: int, determinism: bool) -> Any:
    """The log-probabilities of the policy before its step, and PPO's KL to them in this step."""
    options = {"full_determinism": determinism, "max_token_len_per_gpu": 400, "infer_max_token_len_per_gpu": 400}
    made = worker(folder, "zbkern", pipeline_parallel_size=stages, schedule="zb_h1", **options)
    data = batch()
    before = made.infer_batch(data.clone())
    from verl.workers.utils.padding import no_padding_2_padding

    if before is not None:
        data["old_log_probs"] = no_padding_2_padding(before["log_probs"], data) * data["response_mask"]
    metrics = step(made, data)
    norm = metrics.get("grad_norm")
    after = weights(made)
    made.engine.pipe.close()
    kl = [value for each in metrics.get("actor/ppo_kl", ()) for value in each.values]
    return None if before is None else (before["log_probs"].values(), kl, norm), after


def test_the_policy_of_a_step_has_the_bits_of_its_log_probabilities(folder: Path, two_ranks: Any) -> None:
    ((values, kl, _),) = [
        each for each, _ in two_ranks.run(ratios, str(folder / "untied"), 2, False, timeout=TIMEOUT) if each
    ]
    assert values.abs().max() > 0
    assert kl
    assert {*kl} == {0.0}


def values_of(folder: str, stages: int) -> Any:
    """A critic's values, and the loss and the norm of its step."""
    made = worker(folder, "zbkern", "value_model", pipeline_parallel_size=stages)
    made.set_loss_fn(critic_loss())
    data = critic_batch()
    values, metrics = made.infer_batch(data.clone()), step(made, data)
    made.engine.pipe.close()
    return None if values is None else (values["values"].unbind(), metrics["loss"], metrics["grad_norm"])


def critic_batch() -> Any:
    data = batch()
    data["values"], data["returns"] = data["old_log_probs"], data["ref_log_prob"]
    return data


def critic_loss() -> Any:
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    return partial(value_loss, config=CriticConfig(strategy="zbkern", rollout_n=1, ppo_micro_batch_size_per_gpu=1))


def test_a_critic_has_a_value_for_each_token(folder: Path, two_ranks: Any, tmp_path: Path) -> None:
    import transformers
    from verl.utils import tensordict_utils

    model = transformers.AutoModelForTokenClassification.from_pretrained(folder / "untied", num_labels=1).eval()
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(folder / "untied").save_pretrained(tmp_path)
    ((found, loss, norm),) = [
        each for each in two_ranks.run(values_of, str(tmp_path), 2, timeout=TIMEOUT) if each is not None
    ]
    use_cpu()
    data = critic_batch()
    want = [model(row[None]).logits[0, :, 0] for row in data["input_ids"].unbind()]
    torch.testing.assert_close([*found], [each.detach() for each in want], rtol=1e-5, atol=1e-6)
    tokens = data["loss_mask"].sum().item()
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens)
    expected, _ = critic_loss()(model_output={"values": torch.cat(want)}, data=data)
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)


STUBS = Path(__file__).parents[1] / "support" / "stubs"


@pytest.mark.parametrize("file", sorted(STUBS.rglob("verl/**/*.pyi")), ids=lambda file: str(file.relative_to(STUBS)))
def test_the_names_and_signatures_that_mypy_knows_are_verls(file: Path) -> None:
    """Where verl is not installed, as in CI, mypy checks the engine against them."""
    path = file.relative_to(STUBS).with_suffix("").parts
    module = importlib.import_module(".".join(path[:-1] if path[-1] == "__init__" else path))

    def compare(nodes: list[ast.stmt], real: Any, where: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                found = getattr(real, node.name)
                if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
                    assert isinstance(found, property), f"{where}.{node.name}"
                    continue
                theirs = [
                    (p.name, p.kind.name, p.default is p.empty)
                    for p in inspect.signature(getattr(found, "__func__", found)).parameters.values()
                ]
                assert parameters(node) == theirs, f"{where}.{node.name}"
            elif isinstance(node, ast.ClassDef):
                compare(node.body, getattr(real, node.name), node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(real, type):
                fields = getattr(real, "__dataclass_fields__", None) or inspect.getsource(real.__init__)
                assert node.target.id in fields, f"{where}.{node.target.id}"

    def parameters(node: ast.FunctionDef) -> list[tuple[str, str, bool]]:
        given = node.args
        first_default = len(given.args) - len(given.defaults)
        found = [(a.arg, "POSITIONAL_OR_KEYWORD", number < first_default) for number, a in enumerate(given.args)]
        return [*found, *([(given.kwarg.arg, "VAR_KEYWORD", True)] if given.kwarg else [])]

    compare(ast.parse(file.read_text()).body, module, file.name)


def test_options_that_would_be_left_out_are_refused() -> None:
    from zbkern.integrations.verl import EngineConfig, _check_options

    model = {"use_remove_padding": True, "lora_rank": 0, "enable_activation_offload": False}
    model["enable_gradient_checkpointing"] = True
    mtp = SimpleNamespace(enable=False)
    engines = {"pipeline_parallel_size": 3, "schedule": "none", "dtype": "float16", "ulysses_sequence_parallel_size": 2}
    _check_options(SimpleNamespace(**model, mtp=mtp), EngineConfig(strategy="zbkern"), 4)
    for name, value in engines.items():
        with pytest.raises(ValueError, match=f"PipelineEngine: {name} must be .*; got {value!r}"):
            _check_options(SimpleNamespace(**model, mtp=mtp), EngineConfig(strategy="zbkern", **{name: value}), 4)
    for name, value in {"use_remove_padding": False, "lora_rank": 8, "enable_activation_offload": True}.items():
        with pytest.raises(ValueError, match=f"PipelineEngine: {name} must be .*; got {value!r}"):
            _check_options(SimpleNamespace(**{**model, name: value}, mtp=mtp), EngineConfig(strategy="zbkern"), 4)
    with pytest.raises(ValueError, match="enable_gradient_checkpointing must be False with costs"):
        _check_options(SimpleNamespace(**model, mtp=mtp), EngineConfig(strategy="zbkern", costs=COSTS), 4)


def test_batches_that_ask_for_more_are_refused() -> None:
    from verl.utils import tensordict_utils

    from zbkern.integrations.verl import _check_batch

    use_cpu()
    _check_batch(batch())
    for name in ("distillation_use_topk", "calculate_sum_pi_squared", "enable_routing_replay"):
        data = batch()
        tensordict_utils.assign_non_tensor(data, **{name: True})
        with pytest.raises(ValueError, match=f"got {name}"):
            _check_batch(data)


def test_the_options_of_the_page_make_the_engine() -> None:
    """verl's trainer composes its configuration by hydra, and makes the dataclasses of it."""
    import hydra
    from omegaconf import open_dict
    from verl.utils.config import omega_conf_to_dataclass

    from zbkern.integrations.verl import EngineConfig

    (command,) = [each for each in PAGE.read_text(encoding="utf-8").split("```") if "strategy=zbkern" in each]
    overrides = [word for word in command.split() if "=" in word]
    assert len(overrides) > 3
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", [*overrides, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"])
    actor, reference = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    with open_dict(reference):  # as verl's worker does
        for name in [name for name in reference if name.startswith("log_prob_")]:
            del reference[name]
        reference.ppo_micro_batch_size_per_gpu = 1
    for part in (actor, reference):
        engine = omega_conf_to_dataclass(part).engine
        assert isinstance(engine, EngineConfig)
        assert (engine.strategy, engine.pipeline_parallel_size) == ("zbkern", 4)
    assert blocks(PAGE)
