"""What `cut` makes of a model: its layers and their names, a plan's partition, arguments, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.small_models import DECODERS, batch, config_of, make, transformers
from zbkern.pipeline import (
    LayerCosts,
    ModelCosts,
    Pipeline,
    PlanOptions,
    cut,
    layers_of,
    plan,
    schedules,
    token_loss,
    token_targets,
)
from zbkern.pipeline.transport.local import LocalTransport


class Positions(nn.Module):
    """Its second embedding is no layer of a chain: its output is added to that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(4, 2), nn.Embedding(4, 2)
        self.blocks, self.head = nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 4)


@pytest.mark.parametrize("mode", [True, False])
def test_chunks_are_in_the_mode_of_their_model(mode: bool) -> None:
    (chunk,) = cut(make("llama").train(mode), schedules.zb_h1(2, 2), rank=0)
    assert {module.training for module in chunk.modules()} == {mode}
    with pytest.raises(Exception, match="cut: the model goes on in another chunk: call the chunk"):
        chunk.whole(batch()[0])


def test_a_plan_brings_its_partition() -> None:
    model = make("llama")
    layers = [LayerCosts(layer.name, 4, 4, 4) for layer in layers_of(model)]
    layers[0] = LayerCosts(layers[0].name, 12, 12, 12)  # so that an even partition is not the best
    found = plan(ModelCosts(tuple(layers)), 2, 4, chunks=1, effort=1)
    names = [cut(model, found, rank=rank)[0].layer_names for rank in range(2)]
    assert [*names[0], *names[1]] == [layer.name for layer in layers]
    assert found.partition == (0, len(names[0])) != (0, 4)


def test_a_plan_of_other_layers_is_refused() -> None:
    """As of a configuration with MTP layers, which the transformers library does not build."""
    model = make("llama")
    names = [layer.name for layer in layers_of(model)]

    def planned(names: list[str]) -> Any:
        layers = tuple(LayerCosts(name, 4, 4, 4) for name in names)
        return plan(ModelCosts(layers), 2, 4, chunks=1, effort=0, options=PlanOptions(partition=(0, 4)))

    for fitting in (
        names,
        names[:-1],
        [str(number) for number in range(len(names))],
    ):  # of a norm with its head; others
        assert cut(model, planned(fitting), rank=1)[0].layer_names == names[4:]
    for other, said in (
        ([*names[:2], "more", *names[2:]], "'model.layers.2', as the plan counts them; in the model that is"),
        ([*names[:4], "mtp.0", *names[4:]], "'mtp.0', as the plan counts them; in the model that is 'model.layers.3'"),
    ):
        with pytest.raises(ValueError, match=rf"cut: chunk 1 must begin with {said}"):
            cut(model, planned(other), rank=1)


def test_a_configuration_has_the_layers_of_its_model() -> None:
    model = make("gemma2")
    assert layers_of(model.config) == layers_of(model)
    with pytest.raises(TypeError, match=r"layers_of: model must be a torch\.nn\.Module or a configuration of"):
        layers_of("llama")


def test_layers_and_ties_are_those_of_the_model() -> None:
    layers = layers_of(make("llama"))
    assert [layer.letter for layer in layers] == [*"EttttLL"]
    assert [layer.kind for layer in layers][-2:] == ["norm", "head"]
    assert [layer.name for layer in layers][:2] == ["model.embed_tokens", "model.layers.0"]
    assert [layer.tied for layer in layers if layer.tied] == ["model.embed_tokens.weight"] * 2
    assert layers[0].parameters == layers[-1].parameters == 61 * 32
    assert layers_of(make("gpt2"))[0].name == "transformer.wte"


def test_a_chunk_shares_the_models_weights_and_holds_no_others() -> None:
    model = make("llama")
    first, last = (cut(model, schedules.zb_h1(2, 2), rank=rank)[0] for rank in range(2))
    whole = dict(model.named_parameters(remove_duplicate=False))
    for chunk in (first, last):
        assert all(parameter is whole[name] for name, parameter in chunk.named_parameters())
    names = [set(chunk.state_dict()) for chunk in (first, last)]
    assert names[0] | names[1] == set(model.state_dict())
    assert not names[0] & names[1]


def test_positions_of_gpt2_are_where_they_are_added() -> None:
    first, second = (cut(make("gpt2"), schedules.zb_h1(2, 2), [0, 1], rank=rank)[0] for rank in range(2))
    assert set(first.state_dict()) == {"transformer.wte.weight"}
    assert "transformer.wpe.weight" in second.state_dict()


def test_layers_in_another_order_or_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    chunk = cut(model, schedules.zb_h1(2, 2), [0, 1], layers=["1", "0"], rank=0)[0]
    with pytest.raises(ValueError, match=r"layer '1' must run before '0'.*in the order in which they run"):
        chunk(torch.ones(1, 4))
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared)
    chunk = cut(model, schedules.zb_h1(2, 2), [0, 1], layers=["0", "1"], rank=1)[0]
    with pytest.raises(ValueError, match="layer '0' runs more than once"):
        chunk(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model must be a torch.nn.Module or a configuration"),
        ({"plan": None}, "plan must be a Plan or a Schedule; got NoneType"),
        ({"partition": [0, 1, 2]}, r"must have the 2 chunks of the schedule; got 3"),
        ({"partition": [0, 9]}, "stay below the 7 layers"),
        ({"partition": "E|ttL"}, "must have the model's layers, 'Et\\*4L'"),
        ({"layers": ["model.embed"]}, "the model has no module 'model.embed'"),
        ({"layers": ["model", "model.norm"]}, "'model.norm' inside of 'model'"),
        ({"layers": {"model.norm": "nose"}}, "kind of layer 'model.norm' must be one of"),
        ({"layers": "model"}, "must be a list of names of modules"),
        (
            {
                "model": nn.ModuleDict(
                    {"body": nn.ModuleDict({"wte": nn.Linear(1, 1), "h": nn.ModuleList()}), "d": nn.Dropout()}
                )
            },
            r"such as layers=\['body.wte', 'body.h.\*'\]",
        ),
        ({"model": nn.Linear(2, 2)}, "Linear is no model of the transformers library; name them"),
        ({"rank": None}, "rank must be given"),
        ({"rank": 2}, r"rank must be a place in the pipeline, from 0 to 1; got 2: with replicas .*get_local_rank"),
        ({"model": Positions()}, r"such as layers=\['tokens', 'blocks.\*', 'head'\]"),
        ({"weights": "nowhere"}, "weights must be None for a model that has its weights"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    given = {"model": make("llama"), "plan": schedules.zb_h1(2, 2), "rank": 0, **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        cut(**given)


def test_models_that_are_no_chain_are_refused() -> None:
    with pytest.raises(ValueError, match=r"AutoModelForCausalLM makes a decoder.*; got ViTConfig: Unrec[^\n]*$"):
        cut(transformers.ViTConfig(), schedules.zb_h1(2, 2), rank=0)
    speech = transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, layerdrop=0.0,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        )
    )  # fmt: skip
    words = r"Wav2Vec2Model has no embedding of tokens or images.*; name them .*, such as layers="
    with pytest.raises(ValueError, match=words):
        cut(speech, schedules.zb_h1(2, 2), rank=0)


def test_few_blocks_need_a_partition() -> None:
    with pytest.raises(ValueError, match="4 blocks and 8 chunks"):
        cut(make("llama"), schedules.zb_h1(8, 2), rank=0)


def test_an_argument_that_the_model_would_ignore_is_refused() -> None:
    """transformers' own forward takes it without a word, and computes as without a mask."""
    tokens, mask, _ = batch()
    (chunk,) = cut(make("llama"), schedules.zb_h1(1, 2), rank=0)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM has no argument 'atention_mask' and .* as 'attention_mask'"
    ):
        chunk(tokens, atention_mask=mask)
    chunk(tokens, attention_mask=mask, num_items_in_batch=4)  # what the library hands on to all models
    with pytest.raises(ValueError, match=r"'attn_mask' and .* such as 'attention_mask'$"):
        chunk(tokens, attn_mask=mask)
    with pytest.raises(ValueError, match=r"'weather' and would ignore it: leave it out of the batch and of side$"):
        chunk(tokens, weather=mask)


def test_no_other_name_is_suggested_where_none_is_similar() -> None:
    """xLSTM has no mask, and a tokenizer's batch has one."""
    config = transformers.xLSTMConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_heads=4)
    tokens, mask, _ = batch()
    (chunk,) = cut(config, schedules.zb_h1(1, 2), rank=0)
    with pytest.raises(
        ValueError, match=r"'attention_mask' and would ignore it: leave it out of the batch and of side$"
    ):
        chunk(tokens, attention_mask=mask)


def test_checkpointing_repeats_dropout_and_evaluation_has_none() -> None:
    def run(checkpointing: bool) -> tuple[Any, ...]:
        model = make("llama").bfloat16()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.2
        if checkpointing:
            model.gradient_checkpointing_enable()
        schedule = schedules.zb_v(1, 4)
        chunks = [zbkern.convert(chunk) for chunk in cut(model, schedule, rank=0)]
        tokens, mask, labels = batch()
        arguments = tokens, token_targets(labels, 4), {"attention_mask": mask}
        with Pipeline(chunks, schedule, token_loss, LocalTransport.ring(1)[0]) as pipe:
            torch.manual_seed(5)
            losses = [pipe.step(*arguments), pipe.evaluate(*arguments), pipe.evaluate(*arguments)]
        return losses, [parameter.grad for chunk in chunks for parameter in chunk.parameters()]

    (kept, wanted), (again, found) = run(False), run(True)
    assert kept == again
    assert kept[0] != kept[1] == kept[2]
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_a_part_of_a_model_refuses_what_whole_models_do(tmp_path: Path) -> None:
    """It would write a folder that from_pretrained fills up with random weights, or fail for want of other chunks."""
    for rank in range(2):
        (chunk,) = cut(make("llama"), schedules.zb_h1(2, 2), rank=rank)
        with pytest.raises(ValueError, match=r"resize_token_embeddings: other.*: resize the embeddings of the whole"):
            chunk.whole.resize_token_embeddings(70)
        with pytest.raises(ValueError, match=r"save_pretrained: other chunks have parts of the model: call .*export"):
            chunk.whole.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="generate: other chunks have parts of the model: let one process"):
            chunk.whole.generate(batch()[0])
    assert not [*tmp_path.iterdir()]
    (chunk,) = cut(make("llama"), schedules.gpipe(1, 1))
    chunk.whole.resize_token_embeddings(70)
    chunk.whole.save_pretrained(tmp_path)
    assert chunk.get_parameter("model.embed_tokens.weight").shape[0] == 70


def test_the_layer_of_a_later_chunk_that_runs_early_is_named() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for number in (0, 3, 1, 2):
                x = self.layers[number](x)
            return x

    (chunk,) = cut(Early(), schedules.zb_h1(2, 2), layers=["layers.*"], rank=0)
    with pytest.raises(ValueError, match=r"layer 'layers.1' must run before 'layers.3'; it did not"):
        chunk(torch.ones(2, 2))


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.24.0.dev0", ""])
def test_an_older_version_of_the_library_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # another object than the import
    if not version.startswith("4"):
        assert len(layers_of(model)) == len(layers_of(model.config))
        return
    for given in (model, model.config):
        with pytest.raises(
            ImportError, match=r"cut: models of the transformers library must be of version 5 .*4\.57\.6"
        ):
            cut(given, schedules.zb_h1(2, 2), rank=0)
    assert len(layers_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == 2  # models of one's own


def test_random_numbers_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the CPU, and of devices that this model is not on."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("all GPUs draw other numbers"))
    state = torch.get_rng_state()
    config = config_of(*DECODERS["llama"])
    assert any(layer.name.endswith(":mlp") for layer in layers_of(config, halves=True))
    cut(config, schedules.zb_h1(2, 2), [0, 2.5], rank=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("layers", [None, ["0", "2"], ["*"]])
def test_one_module_as_two_layers_is_refused(layers: Any) -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"layers_of: '0' and '2' are one module, and each layer is called once: make"):
        cut(nn.Sequential(layer, nn.Tanh(), layer), schedules.zb_h1(2, 2), layers=layers, rank=0)
