"""Kinds of models besides decoders of text: losses, gradients and exported folders are those of one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chunks import gradients_of, step_and_evaluate
from tests.support.cut_models import check_files_and_names
from tests.support.seeds import seed
from tests.support.small_models import (
    BART,
    DECODERS,
    IMAGES,
    KINDS,
    SEQ2SEQ,
    SPEECH,
    config_of,
    make_kind,
    transformers,
)
from zbkern.pipeline import Schedule, cut, layer_chunks, layers_of, schedules

ROWS, LENGTH = 4, 12
# to LLaVA, BART, T5, Qwen2-VL and BERT, for the library's part in it
ALIKE = {
    *("llava", "vipllava", "paligemma", "smolvlm", "aya_vision", "mistral3", "internvl"),
    *("marian", "m2m_100", "bart_classifier", "t5_untied", "switch", "qwen2_5_vl", "glm4v", "bert_choices"),
}


def batch(kind: str, model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """By the names of the model's arguments, and what is to be predicted."""
    _, sizes, head, _ = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 57, (ROWS, LENGTH), generator=generator)
    if head == "ImageClassification":
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator)}, torch.arange(ROWS) % 3
    if head == "AudioClassification":
        return {"input_values": torch.randn(ROWS, 32, 16, generator=generator)}, torch.arange(ROWS) % 3
    if head == SPEECH:
        labels = tokens[:, :7].masked_fill(torch.arange(7) >= torch.tensor([7, 4, 6, 5])[:, None], -100)
        return {"input_features": torch.randn(ROWS, 8, 40, generator=generator), "labels": labels}, labels
    if head == "MultipleChoice":
        return {"input_ids": torch.stack([tokens, tokens.flip(1)], 1)}, torch.arange(ROWS) % 2
    if head == IMAGES:
        given = {"input_ids": tokens}
        tokens[:, 1:7] = torch.tensor([58, 57, 57, 57, 57, 59])
        if "qwen" in kind or kind == "glm4v":
            given["pixel_values"] = torch.randn(16 * ROWS, 96, generator=generator)
            given |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS), "mm_token_type_ids": (tokens == 57).long()}
        else:
            shape = (ROWS, *((1,) if kind == "smolvlm" else ()), 3, 16, 16)
            given["pixel_values"] = torch.randn(shape, generator=generator)
        if kind in ("gemma3", "paligemma"):
            given["token_type_ids"] = (tokens == 57).long() if kind == "gemma3" else (tokens != 57).long()
        if kind == "mistral3":
            given["image_sizes"] = torch.tensor([[16, 16]] * ROWS)
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


def check(kind: str, schedule: Schedule, partition: list[float] | None, folder: Path) -> None:
    model = make_kind(kind)
    given, targets = batch(kind, model)
    given = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    output = model(**given, **({} if kind in ("vit", "ast") or "bert" in kind else {"use_cache": False}))
    expected = loss_fn(getattr(output, "logits", output), targets) / schedule.microbatches
    expected.backward()

    losses, chunks = step_and_evaluate(model, schedule, partition, loss_fn, given, targets)
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach(), rtol=KINDS[kind][3], atol=0)
    gradients = gradients_of(chunks)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.abs().max() > 1e-9:
            difference = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert difference < KINDS[kind][3], (name, difference)
    check_files_and_names(folder, type(model), in_order(chunks, schedule), schedule, partition)


def in_order(chunks: list[Any], schedule: Schedule) -> list[Any]:
    """Of the model; given by rank."""
    numbers = [number for rank in range(schedule.ranks) for number in schedule.chunks_of(rank)]
    return [chunk for _, chunk in sorted(zip(numbers, chunks, strict=True), key=lambda pair: pair[0])]


def random_cut(rng: random.Random, kind: str) -> tuple[Schedule, list[float] | None]:
    """Encoders of sounds are in one chunk."""
    schedule = rng.choice([schedules.zb_v(2, 2), schedules.zb_h1(4, 4), schedules.one_f_one_b(2, 4)])
    if kind == "whisper" or rng.random() < 0.4:
        return schedules.zb_v(2, 2) if kind == "whisper" else schedule, None
    first = 2 if KINDS[kind][2] == IMAGES else 1  # images are put among the embeddings before the first block
    starts = range(first, len(layers_of(make_kind(kind))) - 1)  # the head of T5 goes with the norm before it
    return schedule, [0, *sorted(rng.sample(starts, len(schedule.placement) - 1))]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in ALIKE else kind for kind in KINDS]
)
def test_every_kind(kind: str, tmp_path: Path) -> None:
    check(kind, *random_cut(random.Random(f"{seed(0)} 0 {kind}"), kind), tmp_path)


def test_what_cannot_be_in_a_pipeline_is_refused() -> None:
    config = transformers.M2M100Config(**BART, encoder_layerdrop=0.1)
    with pytest.raises(ValueError, match=r"config.encoder_layerdrop must be 0 when the model is made"):
        layers_of(config)
    config.encoder_layerdrop = 0.0
    config.decoder_layerdrop = 0.0
    (chunk,) = cut(config, schedules.zb_h1(1, 2), rank=0)
    tokens = torch.ones(2, 4, dtype=torch.long)
    chunk.whole.__class__ = type("Other", (type(chunk.whole),), {"forward": lambda self, input_ids: None})
    with pytest.raises(ValueError, match="Other must have decoder_input_ids"):
        chunk.split_batch({"input_ids": tokens, "labels": tokens})
    t5 = make_kind("t5")
    (head,) = cut(t5, schedules.zb_h1(2, 2), [0, len(layers_of(t5)) - 1], rank=1)
    hidden = torch.ones(3, 4, t5.config.d_model, dtype=torch.double)  # as many rows as a block gives tensors
    with pytest.raises(ValueError, match=r"use what is computed from that of 'decoder.block.0', which another chunk"):
        head(passed=hidden, skipped={"encoder": hidden}, decoder_input_ids=torch.ones(3, 4, dtype=torch.long))


def test_an_encoder_of_sounds_is_in_one_chunk() -> None:
    model = make_kind("whisper").float()
    given, _ = batch("whisper", model)
    for partition in ([0, 1], [0, 3]):
        with pytest.raises(ValueError, match=r"encoder of WhisperFor.*, of sounds.*begin with layer 4, .*embed_tokens"):
            cut(model, schedules.zb_h1(2, 2), partition, rank=1)
    with pytest.raises(ValueError, match="layer_chunks: the encoder of Whisper"):
        layer_chunks(model, rank=0, ranks=2)
    kind = transformers.WhisperForAudioClassification
    with pytest.raises(ValueError, match=r"WhisperForAudio\S+ has no embedding of tokens or images.*nn.Sequential"):
        layers_of(kind(model.config))
    sizes = {"hidden_size": 32, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "vocab_size": 61}
    sizes |= {
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2,
        "intermediate_size": 48,
        "pad_token_id": 0,
    }
    moonshine = transformers.MoonshineForConditionalGeneration(transformers.MoonshineConfig(**sizes))
    first, second = (cut(moonshine, schedules.zb_h1(2, 2), [0, 4], rank=rank)[0] for rank in range(2))
    own, every = first.split_batch({"input_values": torch.randn(2, 3000), "labels": given["labels"][:2]})
    with pytest.raises(ValueError, match=r"use 'attention_mask' of what the encoder gives, .*nn.Sequential"):
        second(first(**own, **every), **every)


@pytest.mark.parametrize("name", ["PoolFormerForImageClassification", "FastSpeech2ConformerModel", "FSMTModel"])
def test_models_whose_layers_the_library_does_not_tell_are_refused_in_a_sentence(name: str) -> None:
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, name).config_class())
    with pytest.raises(ValueError, match=rf"{name} (has no|must have one) embedding.* name them .*, such as layers="):
        layers_of(model)


def test_images_that_would_be_lost_are_refused() -> None:
    model = make_kind("llava").float()
    given, _ = batch("llava", model)
    two = schedules.zb_h1(2, 2)
    first, second = (cut(model, two, rank=rank)[0] for rank in range(2))
    images = {"pixel_values": given["pixel_values"]}
    with pytest.raises(ValueError, match="put among the embeddings"):
        cut(model, two, [0, 1], rank=0)[0](**given)
    with pytest.raises(ValueError, match=r"llava finds by token ids where 'pixel_values' is.*side={'input_ids'"):
        second(first(given["input_ids"], **images), **images)
    after = cut(model, two, [0, 1], rank=1)[0]
    with pytest.raises(ValueError, match=r"put among the embeddings after '.*embed_tokens'.*cut elsewhere"):
        after(torch.randn(ROWS, LENGTH, 32), **given)
    second.whole.config.model_type = "another"
    with pytest.raises(ValueError, match=r"what another makes of 'pixel_values' may go to layers of several chunks"):
        second(torch.randn(ROWS, LENGTH, 32), **given)
    second = cut(make_kind("qwen2_vl").float(), two, rank=1)[0]
    with pytest.raises(ValueError, match=r"qwen2_vl finds by token ids where 'image_grid_thw' is.*side={'input_ids'"):
        second(torch.randn(ROWS, LENGTH, 32), image_grid_thw=torch.tensor([[1, 4, 4]] * ROWS))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_classifier_without_token_ids_on_the_last_rank_is_refused(family: str) -> None:
    """The library takes the last token then, which is padding here."""
    config = config_of(*DECODERS[family])
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    first, second = (cut(model, schedules.zb_h1(2, 2), rank=rank)[0] for rank in range(2))
    tokens = torch.ones(2, 4, dtype=torch.long)
    side = {"attention_mask": tokens, "input_ids": tokens}
    assert first.split_batch(side) == ({}, side)
    with pytest.raises(ValueError, match=r"pools by its padding, .*side={'input_ids': tokens}, on every rank"):
        second(first(tokens))
