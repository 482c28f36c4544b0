"""Kinds of models besides decoders of text: losses, gradients and exported folders are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import results_on_threads
from zbkern.pipeline import Pipeline, Schedule, cut, export, layers_of, schedules
from zbkern.pipeline.transport.local import LocalTransport

transformers = pytest.importorskip("transformers", minversion="5.0", reason="cut is for transformers 5")

ROWS, LENGTH = 4, 12
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {
    **SIZES,
    "vocab_size": 61,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**TEXT, "num_key_value_heads": 2}
BERT = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
BART = {"vocab_size": 61, "d_model": 32, "max_position_embeddings": 32, "dropout": 0.0, "decoder_start_token_id": 2}
for side in ("encoder", "decoder"):
    BART |= {f"{side}_layers": 4, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
SEEN = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 16}
QWEN = {"hidden_size": 32, "depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "in_channels": 3}
SPECIAL = {"image_token_id": 57, "vision_start_token_id": 58, "vision_end_token_id": 59, "video_token_id": 60}
QWEN_TEXT = {**DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
SEQ2SEQ, IMAGES = "Seq2SeqLM", "ImageTextToText"
# the configuration, the head, and how exact it is: the norms and rotary embeddings of some are in float32
KINDS: dict[str, tuple[str, dict[str, Any], str, float]] = {
    "t5": ("T5", T5, SEQ2SEQ, 1e-6),
    "t5_untied": ("T5", {**T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}, SEQ2SEQ, 2e-6),
    "switch": ("SwitchTransformers", {**T5, "num_experts": 4, "router_jitter_noise": 0.0}, SEQ2SEQ, 3e-6),
    "bart": ("Bart", BART, SEQ2SEQ, 1e-12),
    "marian": ("Marian", {**BART, "pad_token_id": 1, "eos_token_id": 2}, SEQ2SEQ, 1e-12),
    "bart_classifier": ("Bart", BART, "SequenceClassification", 1e-12),
    "reward": ("Llama", {**DECODER, "num_labels": 1}, "SequenceClassification", 1e-6),
    "odd_padding": ("Qwen3", {**DECODER, "num_labels": 3, "pad_token_id": 60}, "SequenceClassification", 1e-6),
    "tokens": ("Llama", {**DECODER, "num_labels": 5, "classifier_dropout": 0.0}, "TokenClassification", 1e-6),
    "answers": ("Llama", DECODER, "QuestionAnswering", 1e-6),
    "bert": ("Bert", BERT, "MaskedLM", 1e-12),
    "bert_classifier": ("Bert", {**BERT, "num_labels": 3}, "SequenceClassification", 1e-12),
    "bert_choices": ("Bert", BERT, "MultipleChoice", 1e-12),
    "vit": ("ViT", {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 3}, "ImageClassification", 1e-12),
    "llava": (
        "Llava",
        {
            "vision_config": {**SEEN, "model_type": "clip_vision_model", "patch_size": 8, "projection_dim": 32},
            "text_config": {**DECODER, "model_type": "llama"},
            "image_token_id": 57,
        },
        IMAGES,
        1e-6,
    ),
    "gemma3": (
        "Gemma3",
        {
            "vision_config": {**SEEN, "model_type": "siglip_vision_model", "patch_size": 4},
            "text_config": {**DECODER, "model_type": "gemma3_text", "head_dim": 8},
            "mm_tokens_per_image": 4,
            "image_token_id": 57,
            "boi_token_id": 58,
            "eoi_token_id": 59,
        },
        IMAGES,
        1e-6,
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {"vision_config": {**QWEN, "embed_dim": 32, "temporal_patch_size": 2}, "text_config": QWEN_TEXT, **SPECIAL},
        IMAGES,
        1e-6,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "vision_config": {**QWEN, "out_hidden_size": 32, "intermediate_size": 48, "window_size": 16},
            "text_config": QWEN_TEXT,
            **SPECIAL,
        },
        IMAGES,
        1e-6,
    ),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    name, sizes, head, _ = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"AutoModelFor{head}").from_config(config).double().train()


def batch(kind: str, model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """By the names of the model's arguments, and what is to be predicted."""
    _, sizes, head, _ = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 57, (ROWS, LENGTH), generator=generator)
    if head == "ImageClassification":
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator)}, torch.arange(ROWS) % 3
    if head == "MultipleChoice":
        return {"input_ids": torch.stack([tokens, tokens.flip(1)], 1)}, torch.arange(ROWS) % 2
    if head == IMAGES:
        given = {"input_ids": tokens}
        tokens[:, 1:7] = torch.tensor([58, 57, 57, 57, 57, 59])
        if "qwen" in kind:
            given["pixel_values"] = torch.randn(16 * ROWS, 96, generator=generator)
            given |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS), "mm_token_type_ids": (tokens == 57).long()}
        else:
            given["pixel_values"] = torch.randn(ROWS, 3, 16, 16, generator=generator)
        if kind == "gemma3":
            given["token_type_ids"] = (tokens == 57).long()
        return given, tokens.masked_fill(tokens > 56, -100)
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, 4, 7, 5])[:, None]).long()
    if "eos" in str(sizes) or head == "SequenceClassification":
        tokens[torch.arange(ROWS), mask.sum(1) - 1] = 2  # which a classifier of BART looks for
    given = {"input_ids": tokens.masked_fill(mask == 0, model.config.pad_token_id or 0), "attention_mask": mask}
    if head == SEQ2SEQ:
        given["labels"] = tokens[:, :7].masked_fill(mask[:, :7] == 0, -100)
        return given, given["labels"]
    if kind == "bart_classifier":
        given["decoder_input_ids"] = given["input_ids"].roll(1, 1)  # as the library makes them of input_ids
        given["decoder_input_ids"][:, 0] = 2
    if head == "SequenceClassification":
        return given, torch.arange(ROWS) % model.config.num_labels
    return given, torch.randint(0, 5, (ROWS, LENGTH), generator=generator).masked_fill(mask == 0, -100)


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """A sum, so that a mean over microbatches is no matter of how many labels each has."""
    if not isinstance(output, Tensor):  # where answers begin and end
        return loss_fn(output.start_logits, target[:, 0] + 2) + loss_fn(output.end_logits, target[:, 0] + 3)
    if output.shape[-1] == 1:
        return (output[:, 0] - target).square().sum()
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=-100, reduction="sum")


def check(kind: str, schedule: Schedule, partition: Sequence[int] | None, folder: Path) -> None:
    model = made(kind)
    given, targets = batch(kind, model)
    given = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    output = model(**given, **({} if kind == "vit" or "bert" in kind else {"use_cache": False}))
    expected = loss_fn(getattr(output, "logits", output), targets) / schedule.microbatches
    expected.backward()

    def run(transport: LocalTransport) -> tuple[list[Any], list[Any]]:
        chunks = [
            zbkern.convert(chunk) for chunk in cut(copy.deepcopy(model), schedule, partition, rank=transport.rank)
        ]
        with Pipeline(chunks, schedule, loss_fn, transport, timeout=30) as pipe:
            return [pipe.step(given, targets), pipe.evaluate(given, targets)], chunks

    found = results_on_threads(schedule.stages, run)
    for loss in [loss for losses, _ in found for loss in losses if loss is not None]:
        torch.testing.assert_close(loss, expected.detach(), rtol=KINDS[kind][3], atol=0)
    chunks = [chunk for _, mine in found for chunk in mine]
    gradients = {name: p.grad for chunk in chunks for name, p in chunk.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.abs().max() > 1e-9:
            difference = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert difference < KINDS[kind][3], (name, difference)
    export(folder, chunks)
    again = type(model).from_pretrained(folder, dtype=torch.float64).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    config = transformers.AutoConfig.from_pretrained(folder)  # names the class, with its head
    for rank in range(schedule.stages):
        for chunk in cut(config, schedule, partition, weights=folder, rank=rank):
            assert all(torch.equal(value, again[name]) for name, value in chunk.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, tmp_path: Path) -> None:
    check(kind, schedules.zb_v(2, 2), None, tmp_path)


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize(
    ("name", "partition"),
    [
        ("one_f_one_b", None),
        ("zb_h1", [0, 3, 6, 9]),  # in the encoder, at the decoder's embedding, in the decoder
        ("zb_h1", [0, 1, 5, 11]),  # an embedding alone; what the encoder does last; the head
    ],
    ids=str,
)
def test_an_encoders_output_reaches_every_layer_of_its_decoder(
    kind: str, name: str, partition: list[int] | None, tmp_path: Path
) -> None:
    stages = len(partition) if partition else 2
    check(kind, getattr(schedules, name)(stages, 4), partition, tmp_path)


@pytest.mark.parametrize("kind", ["vit", "gemma3", "qwen2_5_vl", "reward", "bert"])
def test_four_ranks(kind: str, tmp_path: Path) -> None:
    check(kind, schedules.zb_h1(4, 4), None, tmp_path)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_random_weights_of_an_encoder_decoder_do_not_depend_on_the_partition(kind: str) -> None:
    config = made(kind).config
    states = []
    for partition in ([0, 5], [0, 8]):
        state: dict[str, Tensor] = {}
        for rank in range(2):
            state |= dict(cut(config, schedules.zb_h1(2, 2), partition, rank=rank)[0].state_dict())
        states.append(state)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_what_cannot_be_in_a_pipeline_is_refused() -> None:
    config = transformers.M2M100Config(**BART, encoder_layerdrop=0.1)
    with pytest.raises(ValueError, match=r"config.encoder_layerdrop must be 0 when the model is made"):
        layers_of(config)
    config.encoder_layerdrop = 0.0
    config.decoder_layerdrop = 0.0
    (chunk,) = cut(config, schedules.zb_h1(1, 2), rank=0)
    tokens = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="M2M100ForConditionalGeneration must have decoder_input_ids"):
        chunk.split_batch({"input_ids": tokens, "labels": tokens})
