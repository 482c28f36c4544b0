"""What verl asks of an engine: names, signatures and options are verl's, and what would be left out is refused."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.programs import blocks
from tests.support.verl_workers import COSTS, WHY, batch, use_cpu

pytest.importorskip("verl", reason=WHY)

pytestmark = [pytest.mark.slow, pytest.mark.dist]

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
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
    from zbkern.integrations.verl_options import EngineConfig, check_options

    model = {"use_remove_padding": True, "lora_rank": 0, "enable_activation_offload": False}
    model["enable_gradient_checkpointing"] = True
    mtp = SimpleNamespace(enable=False)
    engines = {"pipeline_parallel_size": 3, "schedule": "none", "dtype": "float16", "ulysses_sequence_parallel_size": 2}
    check_options(SimpleNamespace(**model, mtp=mtp), EngineConfig(strategy="zbkern"), 4)
    for name, value in engines.items():
        with pytest.raises(ValueError, match=f"PipelineEngine: {name} must be .*; got {value!r}"):
            check_options(SimpleNamespace(**model, mtp=mtp), EngineConfig(strategy="zbkern", **{name: value}), 4)
    for name, value in {"use_remove_padding": False, "lora_rank": 8, "enable_activation_offload": True}.items():
        with pytest.raises(ValueError, match=f"PipelineEngine: {name} must be .*; got {value!r}"):
            check_options(SimpleNamespace(**{**model, name: value}, mtp=mtp), EngineConfig(strategy="zbkern"), 4)
    with pytest.raises(ValueError, match="enable_gradient_checkpointing must be False with costs"):
        check_options(SimpleNamespace(**model, mtp=mtp), EngineConfig(strategy="zbkern", costs=COSTS), 4)


def test_batches_that_ask_for_more_are_refused() -> None:
    from verl.utils import tensordict_utils

    from zbkern.integrations.verl_options import check_batch

    use_cpu()
    check_batch(batch())
    for name in ("distillation_use_topk", "calculate_sum_pi_squared", "enable_routing_replay"):
        data = batch()
        tensordict_utils.assign_non_tensor(data, **{name: True})
        with pytest.raises(ValueError, match=f"got {name}"):
            check_batch(data)


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
