"""Of every family whose routers have a load-balancing loss, chunks on up to four ranks equal the whole model with it.

Families whose loss is another than the one that zbkern.pipeline.models.router_losses knows are refused by name, and are
in REFUSED.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.support.families import at_most, configured, families
from tests.support.families_in_chunks import batch, made, through_ranks
from tests.support.small_families import OWN
from zbkern.pipeline import layers_of, token_loss

transformers = pytest.importorskip("transformers", minversion="5.0", reason="cut is for transformers 5")

REFUSED = {"doge"}
NOT_CUT = {"deepseek_v4"}  # without token ids on every rank (test_cut_families.py)
COEFFICIENT = 0.7  # so that experts out of balance cost as much as wrong tokens


def families_with_routers() -> list[str]:
    """Told by the files, which take long to import."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(transformers.__path__[0]) / "models"
    files = {name: model_type_to_module_name(name) for name in families()}
    paths = {name: folder / file / f"modeling_{file}.py" for name, file in files.items()}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
    return [name for name, text in texts.items() if "def load_balancing_loss_func" in text and name not in NOT_CUT]


@pytest.mark.slow
@pytest.mark.parametrize("name", families_with_routers())
def test_family(name: str) -> None:
    with at_most(60):
        check(name)


def check(name: str) -> None:
    torch.manual_seed(0)
    model = configured(name, OWN[name]).float().train() if name in OWN else made(name)
    model.config.get_text_config().output_router_logits = True
    model.router_aux_loss_coef = COEFFICIENT
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if name in REFUSED:
        with pytest.raises(ValueError, match="output_router_logits must be False for"):
            layers_of(model)
        return
    tokens, mask, targets = batch()
    wanted, without = copy.deepcopy(model), copy.deepcopy(model)
    given = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
    outputs = wanted(**given, output_router_logits=True)
    expected = token_loss(outputs.logits, targets)
    (expected + COEFFICIENT * outputs.aux_loss).backward()
    token_loss(without(**given).logits, targets).backward()
    parameters = {key: value.grad for key, value in wanted.named_parameters(remove_duplicate=False)}
    others = {key: value.grad for key, value in without.named_parameters(remove_duplicate=False)}
    assert max((parameters[key] - others[key]).abs().max() for key in others if others[key] is not None) > 1e-3
    count = len(layers_of(model))
    for partition in ([0, 1], [0, 1, count // 2, count - 1]):
        loss, gradients = through_ranks(model, partition)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
        assert gradients.keys() == parameters.keys()
        for key, gradient in parameters.items():
            if gradient is not None:
                torch.testing.assert_close(gradients[key], gradient, rtol=1e-3, atol=1e-5, msg=f"{partition}: {key}")
