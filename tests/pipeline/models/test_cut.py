"""Chunks that `cut` makes: any partition gives the loss and the gradients of the whole model."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbkern
from tests.support.chunks import needed, results_on_threads, run_pipelines
from tests.support.small_models import DECODERS, batch, config_of, make, transformers
from zbkern.pipeline import (
    LayerCosts,
    ModelCosts,
    Optimizer,
    Pipeline,
    PipelineError,
    PlanOptions,
    cut,
    layers_of,
    plan,
    schedules,
    token_loss,
    token_targets,
)
from zbkern.pipeline.transport.local import LocalTransport


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


# ---- any module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * mask[..., None]


class Predictor(nn.Module):
    """As multi-token prediction: the next token's embedding beside what the blocks give, a tuple of two."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(16, 8)

    def forward(self, x: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.join(torch.cat((x, embedded.roll(-1, 1)), -1))


class Own(nn.Module):
    """A model of nobody's library: a mask from its tokens, positions of its own, several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.positions = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.again = nn.Embedding(11, 8)
        self.again.weight = self.embed.weight
        self.predict = Predictor()
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).double()
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = torch.sin(block(x, mask))
        x, more = self.predict(x, self.again(tokens))
        return self.head(torch.stack((x, more)))


LAYERS = {"embed": "embedding", "blocks.*": "block", "predict": "mtp", "head": "head"}


@pytest.mark.parametrize("partition", [[0, 1], [0, 2], [0, 3], [0, 5], "Ettt|mL"], ids=str)
def test_a_model_of_ones_own_with_tokens_as_side_inputs(partition: Any) -> None:
    torch.manual_seed(0)
    model = Own().double()
    tokens = torch.randint(0, 11, (4, 6))
    targets = torch.randn(4, 2, 6, 11, dtype=torch.double)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target.transpose(0, 1))

    twin = copy.deepcopy(model)
    expected = loss_fn(twin(tokens), targets)
    expected.backward()
    schedule = schedules.zb_h1(2, 2)
    # the mask and the second use of the embedding need the tokens everywhere, and its weight with them
    model.again = nn.Embedding(11, 8, _weight=model.embed.weight.detach().clone()).double()

    def of_rank(transport: LocalTransport) -> Any:
        chunk = cut(copy.deepcopy(model), schedule, partition, layers=LAYERS, rank=transport.rank)[0]
        with Pipeline(zbkern.convert(chunk), schedule, loss_fn, transport, timeout=30) as pipe:
            loss = pipe.step(None, targets, side={"tokens": tokens})
        return loss, {name: p.grad for name, p in chunk.named_parameters()}

    (_, first), (loss, second) = results_on_threads(2, of_rank)
    torch.testing.assert_close(loss, expected.detach())
    gradients = {**first, **second}
    gradients["embed.weight"] = gradients["embed.weight"] + gradients.pop("again.weight")
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


class WithOwn(nn.Module):
    """Has a parameter and a buffer beside its layers, and numbers them with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.position = nn.Parameter(torch.randn(6, 8))
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.blocks = nn.ModuleDict({str(number): Block() for number in (0, 3, 12)})
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        for block in self.blocks.values():
            x = block(x, self.scale.expand(x.shape[:-1]))
        return self.head(x)


def test_a_parameter_beside_the_layers_is_in_one_chunk() -> None:
    """Also where forwards run again, because an optimizer step was taken back."""
    torch.manual_seed(0)
    model, schedule = WithOwn().double(), schedules.zb_h1(2, 4)
    x, targets = torch.randn(8, 6, 8, dtype=torch.double), torch.randn(8, 6, 5, dtype=torch.double)
    twin = copy.deepcopy(model)
    single = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        single.zero_grad()
        nn.functional.mse_loss(twin(x), targets).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        single.step()

    def of_rank(transport: LocalTransport) -> Any:
        chunks = cut(copy.deepcopy(model), schedule, layers=["embed", "blocks.*", "head"], rank=transport.rank)
        with Pipeline([zbkern.convert(chunk) for chunk in chunks], schedule, nn.functional.mse_loss, transport) as pipe:
            torch_optimizer = torch.optim.SGD(chunks[0].parameters(), lr=0.1)
            optimizer = Optimizer(torch_optimizer, pipe, max_norm=0.1, adaptive=False)
            for _ in range(3):
                optimizer.zero_grad()
                pipe.step(x, targets)
                optimizer.step()
            optimizer.validate()
        return dict(chunks[0].state_dict())

    first, second = results_on_threads(2, of_rank)
    assert first.keys() & second.keys() == set()
    state = {**first, **second}
    assert state.keys() == twin.state_dict().keys()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)


# ---- what cannot be cut


class Chain(nn.Module):
    """An embedding, four blocks and a head; what the embedding gave is used once more by every block."""

    def __init__(self, use: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(4, 9)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        more = self.use(h)
        for block in self.blocks:
            h = block(h) + more
        return self.head(h)


USES: dict[str, Callable[[Tensor], Any]] = {
    "skip": lambda h: h,
    "padding": lambda h: (h == 0).all(-1, keepdim=True),
    "branch": lambda h: 2.0 if h.abs().max() > 1 else 1.0,
    "number": lambda h: float(h.detach().sum()),
    "argmax": lambda h: torch.arange(4.0)[h.argmax(-1)][..., None],
    "nan_to_num": torch.nan_to_num,
    "comparison": lambda h: torch.where(h > 0, torch.ones_like(h), torch.zeros_like(h)),
    "norm": lambda h: (h.norm(dim=-1, keepdim=True) > 1.5).float(),
    "fmax": lambda h: torch.fmax(h, torch.zeros(())),
    "in place": lambda h: torch.zeros_like(h).add_(h > 0),
    "one column": lambda h: torch.cat([torch.zeros_like(h[..., :3]), h[..., 3:]], -1),
}


@pytest.mark.parametrize("use", USES)
def test_what_an_early_layer_gave_is_for_the_next_alone(use: str) -> None:
    """Whatever of it is used, its values or what follows from them, and whether or not a NaN would show it."""
    layers, tokens = ["embed", "blocks.*", "head"], torch.tensor([[1, 0, 3]])
    first, second = (cut(Chain(USES[use]), schedules.zb_h1(2, 2), layers=layers, rank=rank)[0] for rank in range(2))
    passed = first(tokens)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cut: .*'blocks.2'.* uses? .*of 'embed', which another chunk holds"):
            second(passed, x=tokens)


def test_placeholders_have_shapes_and_are_passed_by() -> None:
    """What a forward computes between layers that other chunks hold changes nothing; sizes are theirs."""

    class Between(Chain):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x) + 1
            positions = torch.arange(h.shape[1], dtype=h.dtype)[:, None].to(h) + h.new_zeros(1)
            for block in self.blocks:
                h = nn.functional.gelu(block(h * 1.5).mul_(2) + positions)
            return self.head(h)

    model, tokens = Between(lambda h: h), torch.tensor([[1, 0, 3]])
    chunks = [
        cut(model, schedules.zb_h1(2, 2), layers=["embed", "blocks.*", "head"], rank=rank)[0] for rank in range(2)
    ]
    assert torch.equal(chunks[1](chunks[0](tokens), x=tokens), model(tokens))


def test_whole_numbers_that_an_early_layer_gave() -> None:
    class Block(nn.Linear):
        def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.tanh(super().forward(h))
            return y, y.argmax(-1)

    class Adds(Chain):
        def forward(self, x: Tensor) -> Tensor:
            h, total = self.embed(x), torch.zeros(())
            for block in self.blocks:
                h, largest = block(h)
                total = total + torch.arange(4.0)[largest][..., None]
            return self.head(h + total)

    model, tokens = Adds(lambda h: h), torch.tensor([[1, 0, 3]])
    model.blocks = nn.ModuleList([Block(4, 4) for _ in range(4)])
    layers = ["embed", "blocks.*", "head"]
    first, second = (cut(model, schedules.zb_h1(2, 2), layers=layers, rank=rank)[0] for rank in range(2))
    with pytest.raises(ValueError, match=r"'head' uses what is computed from that of 'blocks.0', which another chunk"):
        second(**first(tokens), x=tokens)


class Beside(nn.Module):
    """Uses a parameter, or a module, that stands beside its layers: in the first token, before and after block 1."""

    def __init__(self, module: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8) if module else nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            first = x[:, :1] * self.first if isinstance(self.first, Tensor) else self.first(x[:, :1])
            x = block(torch.cat([first, x[:, 1:]], 1))
        return x


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_what_stands_beside_the_layers_cannot_be_used_by_several_chunks(module: bool, grad: bool) -> None:
    model, schedule, layers = Beside(module), schedules.zb_h1(2, 2), ["embed", "blocks.*"]
    first, second = (cut(model, schedule, [0, 2], layers=layers, rank=rank)[0] for rank in range(2))
    message = (
        r"cut: the layers 'blocks.1' to 'blocks.2' use 'first', which stands beside the layers and is in the chunk of "
        rf"'{'blocks.0' if module else 'embed'}' alone: put it into each layer that uses it.*or cut"
    )
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message):
        second(first(torch.randn(2, 3, 8)))


def test_numbers_that_are_none_for_another_reason_are_let_through() -> None:
    """And a forward is not seen to have run twice."""
    chunk = cut(WithOwn(), schedules.zb_h1(2, 2), layers=["embed", "blocks.*", "head"], rank=1)[0]
    x = torch.randn(2, 6, 8)
    x[0, 0] = torch.inf
    chunk.whole.head.register_forward_pre_hook(lambda _, inputs: (nn.functional.dropout(inputs[0], 0.5),))
    torch.manual_seed(1)
    found = chunk(x)
    after = torch.rand(1)
    torch.manual_seed(1)
    again = chunk(x)
    assert found.isnan().any()
    assert torch.equal(found.nan_to_num(), again.nan_to_num())
    assert torch.equal(torch.rand(1), after)


def test_chunks_take_distributed_data_parallel(two_ranks: Any) -> None:
    two_ranks.run(wrap_both_chunks)


def wrap_both_chunks() -> None:
    for rank in range(2):
        torch.manual_seed(dist.get_rank())
        chunk = cut(WithOwn(), schedules.zb_h1(2, 2), layers=["embed", "blocks.*", "head"], rank=rank)[0]
        replica = nn.parallel.DistributedDataParallel(zbkern.convert(chunk))
        x = torch.randn(2, 6, 8)
        replica(x).sum().backward()  # its buffers are broadcast again
        found: list[Any] = [None, None]
        dist.all_gather_object(found, [value.tolist() for value in chunk.state_dict().values()])
        assert found[0] == found[1]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_of_chunks_take_fully_shard(two_ranks: Any, checkpointed: bool) -> None:
    """With hooks of its own on what the last layer sends, which bring the layer's weights back for its backward."""
    two_ranks.run(shard_every_layer, checkpointed)


def shard_every_layer(checkpointed: bool) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = WithOwn()
    x = torch.randn(2, 6, 8)
    model(x).sum().backward()
    names = ["embed", "blocks.*", "head"]
    chunks = [cut(copy.deepcopy(model), schedules.zb_h1(2, 2), layers=names, rank=rank)[0] for rank in range(2)]
    for chunk in map(zbkern.convert, chunks):
        if checkpointed:
            wrappers.apply_activation_checkpointing(
                chunk, check_fn=[*map(chunk.get_submodule, chunk.layer_names)].__contains__
            )
        for name in chunk.layer_names:
            fully_shard(chunk.get_submodule(name))
        fully_shard(chunk)
        x = chunk(x)
    x.sum().backward()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            expected = model.get_parameter(name.replace("_checkpoint_wrapped_module.", "")).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), expected, msg=name)


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


# ---- what a batch brings


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


def test_embeddings_are_resized_before_the_model_is_cut() -> None:
    for rank in range(2):
        (chunk,) = cut(make("llama"), schedules.zb_h1(2, 2), rank=rank)
        with pytest.raises(ValueError, match="cut: resize the embeddings of the whole model before you cut it"):
            chunk.whole.resize_token_embeddings(70)
    (chunk,) = cut(make("llama"), schedules.gpipe(1, 1))
    chunk.whole.resize_token_embeddings(70)
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


# ---- models that people bring: what a chunk could not do as the whole model is refused, with what to do instead


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Brought(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Residual() for _ in range(4)])
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for number in range(4):
            x = self.block(number, x)
        return self.head(x)

    def block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x)


class Reentrant(Brought):
    def block(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=True)


class Frozen(Brought):
    """The same, but nothing before the layer without gradients has any."""

    def block(self, number: int, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(number > 1):
            return self.blocks[number](x.detach() if number < 2 else x)


class BackwardHook(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] / 2,))


class OldHook(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_backward_hook(lambda module, inner, outer: None)


class HookBefore(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_pre_hook(lambda module, outer: (outer[0] * 3,))


class CheckpointedHook(BackwardHook):
    def block(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=False)


class HookInside(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].linear.register_full_backward_hook(lambda module, inner, outer: (inner[0] / 2,))


class Scales(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(())) for _ in range(4)])

    def block(self, number: int, x: Tensor) -> Tensor:
        scales = [*self.scales]
        assert len(self.scales) == 4
        return scales[number] * self.blocks[number](x)


class TokensBehind(Brought):
    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens) + nn.functional.one_hot(tokens, 11)


class Leaving(Residual):
    def forward(self, x: Tensor) -> Tensor:
        self.loss = x.square().mean()
        return super().forward(x)


class Left(Brought):
    """Each block leaves a loss, which the model adds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Leaving() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens) + sum(block.loss for block in self.blocks)


class Twice(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


class OtherNames(Brought):
    """The blocks and the embedding have other names, too, some of them before."""

    def __init__(self) -> None:
        super().__init__()
        blocks, self.tokens = self.blocks, self.embed
        del self.blocks
        self.stack, self.first, self.blocks = nn.Sequential(*blocks), blocks[0], blocks
        self.last = self.stack[3:]


class TiedBeside(Brought):
    """Its scores are made by what stands beside the layers, with the weight of the embedding and that of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.mixed = nn.Linear(8, 11), nn.Linear(8, 8)
        self.scores.weight, self.mixed.weight = self.embed.weight, self.blocks[1].linear.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for number in range(4):
            x = self.block(number, x)
        return self.scores(self.mixed(x))


class SharedBeside(TiedBeside):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = self.blocks[1].linear


class Padded(Brought):
    """torch's encoder makes nested tensors in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=self.nested)

    nested = True

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.blocks(self.embed(tokens), src_key_padding_mask=tokens == 0))


class PaddedPlainly(Padded):
    nested = False


@dataclasses.dataclass
class Found:
    logits: Tensor


class OwnOutput(Brought):
    """An output of nobody's library, which the loss takes as it is."""

    def forward(self, tokens: Tensor) -> Any:
        return Found(super().forward(tokens))


REFUSED = {
    Reentrant: r"layer 'blocks.1' is called where gradients are off.* set use_reentrant=False",
    OldHook: r"layer 'blocks.1', whose output goes to another chunk, .* none but those of register_full_backward_hook",
    Scales: r"use 'scales', which stands beside the layers and is in the chunk of 'head' alone",
    TokensBehind: r"uses its argument 'tokens' outside of its first layer.*side=\{'tokens': tensor\}",
    Left: r"uses 'loss' of 'blocks.0', which another chunk holds: .*zbkern.pipeline.add_loss",
    Twice: r"'blocks.0' and 'blocks.2' are one module",
    SharedBeside: r"'blocks.1.linear' and 'mixed' are one module, and the second .* in the chunk of 'blocks.3': cut so "
    r"that .* has both, or make them two.* such as model.mixed.weight = model.blocks.1.linear.weight",
    Padded: r"layer 'blocks.layers.0' must get plain tensors.* enable_nested_tensor=False",
}


def trained(make: type[Brought]) -> None:
    """Asserts that a step and an evaluation are those of one process, over the first cut between two blocks."""
    torch.manual_seed(0)
    model, given = make().double(), torch.randint(1, 11, (4, 6))
    given[1, 4:] = 0

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        logits = output.logits if isinstance(output, Found) else output
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    twin = copy.deepcopy(model)
    expected = loss_fn(twin(given), given)
    expected.backward()
    padded = isinstance(model, Padded)
    layers = {"embed": "embedding", "blocks.layers.*" if padded else "blocks.*": "block", "head": "head"}
    if isinstance(model, TiedBeside):
        del model.head, twin.head, layers["head"]
    batch = (None, given, {"tokens": given}) if padded else (given, given)

    def of_rank(transport: LocalTransport) -> Any:
        chunk = cut(copy.deepcopy(model), schedules.zb_h1(2, 2), layers=layers, rank=transport.rank)[0]
        with Pipeline(zbkern.convert(chunk), schedules.zb_h1(2, 2), loss_fn, transport, timeout=30) as pipe:
            losses = pipe.step(*batch), pipe.evaluate(*batch)
        return losses, {name: p.grad for name, p in chunk.named_parameters(remove_duplicate=False)}

    (_, first), (losses, second) = results_on_threads(2, of_rank)
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach())
    assert first.keys() | second.keys() == {name for name, _ in twin.named_parameters(remove_duplicate=False)}
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        for found in (first, second):
            torch.testing.assert_close(found.get(name, parameter.grad), parameter.grad, msg=name)


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


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_a_chunk_cannot_do_is_refused(make: type[Brought]) -> None:
    with pytest.raises((ValueError, PipelineError), match=REFUSED[make]):
        trained(make)


HOOKED = [BackwardHook, HookBefore, CheckpointedHook, HookInside]
NEAR = [Frozen, *HOOKED, OwnOutput, PaddedPlainly, OtherNames, TiedBeside]


@pytest.mark.parametrize("first", range(1, 6))
def test_backward_hooks_of_every_layer_see_what_they_see_in_one_process(first: int) -> None:
    """Also of the last layer of a chunk, and of the embedding, whose input has no gradient."""
    torch.manual_seed(0)
    model, tokens = Brought().double(), torch.randint(1, 11, (4, 6))
    layers = ["embed", "blocks.*", "head"]

    def seen(modules: Sequence[nn.Module]) -> list[dict[str, list[Any]]]:
        calls: list[dict[str, list[Any]]] = []
        for module in modules:
            calls.append({})
            for name, part in module.named_modules():
                if name in (*layers, *(f"blocks.{number}" for number in range(4))):
                    own = calls[-1].setdefault(name, [])
                    part.register_full_backward_hook(lambda _, inner, outer, own=own: own.append((inner, outer)))
                    part.register_full_backward_pre_hook(lambda _, outer, own=own: own.append(outer))
        return calls

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    schedule, twin = schedules.zb_h1(2, 2), copy.deepcopy(model)
    (expected,) = seen([twin])
    for part in tokens.chunk(2):
        (loss_fn(twin(part), part) / 2).backward()
    modules = [cut(copy.deepcopy(model), schedule, [0, first], layers=layers, rank=rank)[0] for rank in range(2)]
    found = seen([chunk.whole for chunk in modules])
    run_pipelines(schedule, modules, lambda pipe: pipe.step(*needed(pipe, tokens, tokens)), loss_fn)
    assert [bool(each) for each in expected.values()] == [True] * 6
    for name, calls in expected.items():
        torch.testing.assert_close(found[[*expected].index(name) >= first][name], calls, msg=name)


def test_a_backward_hook_of_a_compiled_layer_whose_output_is_sent_is_refused() -> None:
    (chunk,) = cut(BackwardHook(), schedules.zb_h1(2, 2), [0, 4], layers=["embed", "blocks.*", "head"], rank=0)
    chunk.get_submodule("blocks.1").compile(backend="eager")
    chunk(torch.ones(1, 3, dtype=torch.long))  # no more the last one
    (chunk,) = cut(BackwardHook(), schedules.zb_h1(2, 2), layers=["embed", "blocks.*", "head"], rank=0)
    chunk.get_submodule("blocks.1").compile(backend="eager")
    with pytest.raises(ValueError, match=r"'blocks.1', whose output goes .* no backward hook if it is compiled or one"):
        chunk(torch.ones(1, 3, dtype=torch.long))


@pytest.mark.parametrize("make", NEAR, ids=lambda make: make.__name__)
def test_what_is_near_to_that_trains_as_in_one_process(make: type[Brought]) -> None:
    trained(make)
