"""The programs that pages show and those of examples/, for tests that run them; and a small Llama that they train."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = ["the", "pipeline", "has", "a", "bubble", "and", "W", "runs", "in", "it", "while", "B", "is", "sent"]


def blocks(page: Path) -> list[str]:
    """Every block of Python of a page, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def block(page: Path, what: str) -> str:
    """The one block of Python of a page that contains `what`."""
    (found,) = (each for each in blocks(page) if what in each)
    return found


def run_program(program: str, *arguments: str) -> list[str]:
    """The lines that a rank prints which runs a program of a page with these arguments."""
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program.py", *arguments])
        patch.setattr(dist, "init_process_group", lambda backend: None)  # there is one already
        exec(program, {"print": lambda line, flush: printed.append(line)})
    return printed


def example(name: str) -> Any:
    """A program of examples/, as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return __import__(name)


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
