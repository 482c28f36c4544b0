"""Of every family of language models in the transformers library, chunks on up to four ranks equal the whole model.

Where blocks can be cut between attention and MLP, they are; WHOLE are the families of which no block can.
Configurations are those of tests/support/families.py. A family that cannot be cut says why, and is in REFUSED.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.families import at_most, configured, families, of_four_blocks, through_ranks
from tests.support.small_families import OWN
from tests.support.small_models import batch, transformers
from zbkern.pipeline import PipelineError, layers_of, token_loss, token_targets
from zbkern.schedules.layout import numbers_of

USUAL = ["mamba", "opt", "xlm-roberta"]
REFUSED = {
    "blenderbot-small": "stands beside the layers",  # positions, added after a norm of the embedding
    **dict.fromkeys(("openai-gpt", "rwkv"), "cut elsewhere|stands beside"),
    # their blocks give two tensors, which a chunk that begins with the head cannot know
    **dict.fromkeys(("glm_moe_dsa", "hy_v4"), "must run before|cut elsewhere|stands beside"),
    **dict.fromkeys(("big_bird", "cpmant", "deepseek_v4"), "give (it|them) as a side input,.* side={'input_ids'"),
    "hrm_text": "must have one embedding and one list",
    **dict.fromkeys(("gemma4_text", "inkling2_text", "inkling2_loop_text"), "besides the output of the layer before"),
    "dory": "runs more than once in a forward",  # its blocks, in a loop
    "zaya": "stands beside the layers and is in the chunk of 'model.embed_tokens' alone",  # its scales, for every layer
    "xlm": "must have one embedding and one list",
    "prophetnet": "stands beside the layers",
    "ctrl": "used in an in-place operation",  # scales its embeddings in place
    "roformer": "stands beside the layers",  # positions, which take a shape
    "xlnet": "must match the size",  # its layers take [length, rows]
}
# parallel, with norms of sums, with one part, or with parts that add their input themselves
# fmt: off
WHOLE = {
    "bart", "beam", "bert", "bert-generation", "bigbird_pegasus", "blenderbot", "bloom", "camembert", "codegen",
    "cohere", "cohere2", "cohere2_moe", "data2vec-text", "doge", "electra", "ernie", "falcon", "falcon_mamba",
    "gemma4_unified_text", "gpt_neox", "gptj", "longcat_flash", "mamba", "mamba2", "marian", "mbart", "megatron-bert",
    "minimax", "mpt", "mvp", "nemotron_h", "pegasus", "phi", "plbart", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "trocr", "whisper", "xlm-roberta", "xlm-roberta-xl",
}
# fmt: on


def every_cut(model: nn.Module) -> None:
    for first in range(1, len(layers_of(model))):
        through_ranks(model, [0, first])


def check(name: str) -> None:
    model = of_four_blocks(name)
    if name in REFUSED:
        with pytest.raises((ValueError, PipelineError), match=r"^(rank .*ValueError: )?(cut|layers_of): ") as refused:
            every_cut(model)
        assert re.search(REFUSED[name], str(refused.value))
        return
    count = len(layers_of(model))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    wanted, expected = whole(model)
    numbers = numbers_of(layer.name for layer in layers_of(model, halves=True))
    inside = [number for number in numbers if number % 1]
    assert bool(inside) != (name in WHOLE)
    compare(model, wanted, expected, ([0, 1, count // 2, count - 1], [0, *inside[:1], *inside[1:][-1:]]))


def whole(model: nn.Module) -> tuple[nn.Module, Tensor]:
    """A copy of the model with its gradients, and its loss."""
    tokens, mask, labels = batch()
    (targets,) = token_targets(labels, 1)
    wanted = copy.deepcopy(model)
    expected = token_loss(wanted(input_ids=tokens, attention_mask=mask, use_cache=False).logits, targets)
    expected.backward()
    return wanted, expected


def compare(
    model: nn.Module,
    wanted: nn.Module,
    expected: Tensor,
    partitions: Iterable[Sequence[float]],
    as_side: bool = False,
) -> None:
    """The loss and gradients of chunks with those of the whole model. as_side: all chunks get token ids."""
    for partition in partitions:
        loss, gradients = through_ranks(model, partition, as_side)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
        parameters = dict(wanted.named_parameters(remove_duplicate=False))
        assert gradients.keys() == parameters.keys()
        for key, parameter in parameters.items():
            if parameter.grad is not None:
                found = gradients[key]
                assert found is not None, f"{key} has no gradient"
                torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-5, msg=f"{partition}: {key}")


@pytest.mark.parametrize("name", USUAL)
def test_usual(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in families() if name not in USUAL])
def test_family(name: str) -> None:
    with at_most(120):
        check(name)


# ---- families of which part of what REFUSED says can be had


@pytest.mark.slow
def test_deepseek_v4_with_token_ids_in_every_chunk() -> None:
    """Its routers read them: as a side input its blocks can be in any chunks."""
    model = of_four_blocks("deepseek_v4")
    model.set_experts_implementation("eager")
    compare(model, *whole(model), ([0, 1], [0, 3], [0, 2, 3, 4]), as_side=True)


@pytest.mark.slow
def test_gemma4_without_embeddings_for_every_layer() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma4TextConfig(
        **sizes, vocab_size=61, num_key_value_heads=2, head_dim=8, layer_types=kinds, hidden_size_per_layer_input=0
    )
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config).float().train()
    compare(model, *whole(model), ([0, 1], [0, 3], [0, 1, 3, 5]))


# ---- with the load-balancing loss of routers, of every family that has the one of zbkern.pipeline.models.router_losses


COEFFICIENT = 0.7  # so that experts out of balance cost as much as wrong tokens
ANOTHER_LOSS = {"doge"}


def families_with_routers() -> list[str]:
    """Told by the files, which take long to import."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(transformers.__path__[0]) / "models"
    files = {name: model_type_to_module_name(name) for name in families()}
    paths = {name: folder / file / f"modeling_{file}.py" for name, file in files.items()}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
    return [name for name, text in texts.items() if "def load_balancing_loss_func" in text and name not in REFUSED]


@pytest.mark.slow
@pytest.mark.parametrize("name", families_with_routers())
def test_family_with_the_loss_of_its_routers(name: str) -> None:
    with at_most(120):
        check_with_routers(name)


def check_with_routers(name: str) -> None:
    torch.manual_seed(0)
    model = configured(name, OWN[name]).float().train() if name in OWN else of_four_blocks(name)
    model.config.get_text_config().output_router_logits = True
    model.router_aux_loss_coef = COEFFICIENT
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if name in ANOTHER_LOSS:
        with pytest.raises(ValueError, match="output_router_logits must be False for"):
            layers_of(model)
        return
    tokens, mask, labels = batch()
    (targets,) = token_targets(labels, 1)
    wanted, without = copy.deepcopy(model), copy.deepcopy(model)
    given = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
    outputs = wanted(**given, output_router_logits=True)
    expected = token_loss(outputs.logits, targets)
    (expected + COEFFICIENT * outputs.aux_loss).backward()
    token_loss(without(**given).logits, targets).backward()
    pairs = [(p.grad, q.grad) for p, q in zip(wanted.parameters(), without.parameters(), strict=True)]
    assert max((p - q).abs().max() for p, q in pairs if q is not None) > 1e-3
    count = len(layers_of(model))
    compare(model, wanted, expected, ([0, 1], [0, 1, count // 2, count - 1]))
