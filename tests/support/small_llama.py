"""A Llama with a tokenizer in a folder, and lines of text, for programs that train it."""

from __future__ import annotations

from pathlib import Path

import torch

WORDS = ["the", "pipeline", "has", "a", "bubble", "and", "W", "runs", "in", "it", "while", "B", "is", "sent"]


def save_model(folder: Path, *, tied: bool = True) -> None:
    """A small Llama, whose head is its embedding or not, with a tokenizer of a few words, which pads on the right."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<pad>", *dict.fromkeys(WORDS)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(vocabulary), pad_token_id=0)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def write_lines(file: Path, count: int) -> list[str]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    lines = [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator)) for n in lengths]
    file.write_text("\n".join(lines) + "\n")
    return lines
