"""Of every family of language models in the transformers library, chunks on up to four ranks equal the whole model.

Where blocks can be cut between attention and MLP, they are; WHOLE are the families of which no block can.
Configurations are those of tests/support/families.py. A family that cannot be cut says why, and is in REFUSED.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.support.families import ATTEMPTS, at_most, families, loss_of, small
from zbkern.pipeline import cut, layers_of, schedules, token_loss, token_targets
from zbkern.schedules.layout import numbers_of

transformers = pytest.importorskip("transformers", minversion="5.0", reason="cut is for transformers 5")

SIZES = {"num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "num_key_value_heads": 4}
QUIET = {
    "resid_dropout": 0.0,
    "residual_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "embedding_size": 32,
}
USUAL = ["mamba", "opt", "xlm-roberta"]
REFUSED = {
    "blenderbot-small": "stands beside the layers",  # positions, added after a norm of the embedding
    **dict.fromkeys(("openai-gpt", "rembert", "rwkv"), "cut elsewhere|stands beside"),
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
WHOLE = {  # parallel, with norms of sums, with one part, or with parts that add their input themselves
    *[
        "bart",
        "beam",
        "bert",
        "bert-generation",
        "bigbird_pegasus",
        "blenderbot",
        "bloom",
        "camembert",
        "codegen",
        "cohere",
        "cohere2",
    ],
    *[
        "cohere2_moe",
        "data2vec-text",
        "doge",
        "electra",
        "ernie",
        "falcon",
        "falcon_mamba",
        "gemma4_unified_text",
        "gpt_neox",
        "gptj",
    ],
    *[
        "longcat_flash",
        "mamba",
        "mamba2",
        "marian",
        "mbart",
        "megatron-bert",
        "minimax",
        "mpt",
        "mvp",
        "nemotron_h",
        "pegasus",
        "phi",
        "plbart",
    ],
    *["roberta", "roberta-prelayernorm", "roc_bert", "trocr", "whisper", "xlm-roberta", "xlm-roberta-xl"],
}


def made(name: str) -> nn.Module:
    """Four blocks, so that each of four ranks can have one."""
    reasons = []
    for heads in (4, 2):
        for without, other in ATTEMPTS:
            sizes = {**SIZES, "num_key_value_heads": heads, **QUIET}
            torch.manual_seed(0)
            try:
                loss_of(small(name, without, {**other, **sizes}).float())
            except Exception as error:  # whatever a configuration that does not fit raises
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            return small(name, without, {**other, **sizes}).float().train()
    pytest.skip(f"no small configuration: {reasons[0]}")


def batch() -> tuple[Tensor, Tensor, Any]:
    tokens = torch.randint(3, 60, (4, 10), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(10) < torch.tensor([10, 4, 7, 2])[:, None]).long()
    tokens = tokens.masked_fill(mask == 0, 0)
    return tokens, mask, token_targets(tokens.masked_fill(mask == 0, -100), 1)[0]


def tensors(passed: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(passed) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def received(passed: Any) -> Any:
    """What the next rank gets of it: values without their history."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), passed)


def through_ranks(model: nn.Module, partition: Sequence[float]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients by name of chunks that pass on tensors alone, and sum gradients of what they share."""
    tokens, mask, targets = batch()
    schedule = schedules.one_f_one_b(len(partition), 1)
    chunks = [cut(copy.deepcopy(model), schedule, partition, rank=rank)[0] for rank in range(len(partition))]
    given: list[Any] = [tokens]
    outputs: list[Any] = []
    for chunk in chunks:
        inputs = given[-1]
        positional, keywords = ([], inputs) if isinstance(inputs, dict) else ([inputs], {})
        outputs.append(chunk(*positional, attention_mask=mask, **keywords))
        given.append(received(outputs[-1]))
    loss = token_loss(outputs[-1], targets)
    loss.backward()
    for output, passed in reversed([*zip(outputs[:-1], given[1:-1], strict=True)]):
        pairs = [(y, x.grad) for y, x in zip(tensors(output), tensors(passed), strict=True) if x.grad is not None]
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
    gradients = {name: p.grad for chunk in chunks for name, p in chunk.named_parameters(remove_duplicate=False)}
    shared: dict[str, dict[int, Tensor]] = {}
    for chunk in chunks:
        for label, parameter in chunk.tied_parameters.items():
            if parameter.grad is not None:
                shared.setdefault(label, {})[id(parameter)] = parameter.grad
    names = [pair for chunk in chunks for pair in chunk.shared_names.items()]
    gradients.update({name: sum(shared[label].values(), torch.tensor(0.0)) for label, name in names if label in shared})
    return loss.detach(), gradients


def every_cut(model: nn.Module) -> None:
    for first in range(1, len(layers_of(model))):
        through_ranks(model, [0, first])


def check(name: str) -> None:
    model = made(name)
    if name in REFUSED:
        with pytest.raises(ValueError, match=r"^(cut|layers_of): ") as refused:
            every_cut(model)
        assert re.search(REFUSED[name], str(refused.value))
        return
    count = len(layers_of(model))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    tokens, mask, targets = batch()
    wanted = copy.deepcopy(model)
    expected = token_loss(wanted(input_ids=tokens, attention_mask=mask, use_cache=False).logits, targets)
    expected.backward()
    numbers = numbers_of(layer.name for layer in layers_of(model, halves=True))
    inside = [number for number in numbers if number % 1]
    assert bool(inside) != (name in WHOLE)
    for partition in ([0, 1], [0, 1, count // 2, count - 1], [0, *inside[:1], *inside[1:][-2:]]):
        loss, gradients = through_ranks(model, partition)
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
    with at_most(60):
        check(name)
