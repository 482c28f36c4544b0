"""Trains a model of the transformers library, here a small one with random weights, through a pipeline.

    torchrun --nproc-per-node 2 examples/train_transformers.py                       # a Llama with tied embeddings
    torchrun --nproc-per-node 2 examples/train_transformers.py --model qwen3_moe     # a mixture of experts
    torchrun --nproc-per-node 4 examples/train_transformers.py --config FOLDER       # weights of from_pretrained
    torchrun --nproc-per-node 2 examples/train_transformers.py --schedule zb_v       # an even cut, and no measuring
    torchrun --nproc-per-node 2 examples/train_transformers.py --slices 4 --length 256    # sequences in slices

The task is made up: a sequence of random length counts upwards from a random number, so that rows have padding and
microbatches have different numbers of tokens. The cut of the model and its schedule are planned from the measured costs
of its layers. At the end the model is exported, and `from_pretrained` reads it and continues a sequence.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import zbkern
from zbkern.pipeline import (
    Optimizer,
    Pipeline,
    ProfileOptions,
    Schedule,
    cut,
    export,
    layer_chunks,
    plan,
    profile_layers,
    schedules,
    token_loss,
    token_targets,
)

PADDING, FIRST = 0, 3  # the tokens before FIRST are special
EVALUATION = 1_000_000  # a step that no training reaches
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": PADDING, "bos_token_id": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def configuration(name: str) -> Any:
    if name == "llama":
        return transformers.LlamaConfig(**SIZES, **HEADS, eos_token_id=2, tie_word_embeddings=True)
    return transformers.Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, eos_token_id=2)


def batch(step: int, rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, attention mask and labels [rows, length]: counting up, for a length of its own in every row."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(vocabulary, (rows, 1), generator=generator)
    mask = torch.arange(length) < torch.randint(length // 4, length + 1, (rows, 1), generator=generator)
    tokens = FIRST + (start + torch.arange(length)) % (vocabulary - FIRST)
    return tokens.masked_fill(~mask, PADDING), mask.long(), tokens.masked_fill(~mask, -100)


def arguments_of(
    step: int, arguments: argparse.Namespace, vocabulary: int, device: torch.device
) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """What `pipe.step` takes: tokens are used on the first rank, labels on the last, the mask on all."""
    data = batch(step, arguments.rows * arguments.microbatches, arguments.length, vocabulary)
    tokens, mask, labels = (tensor.to(device) for tensor in data)
    return tokens, token_targets(labels, arguments.microbatches), {"attention_mask": mask}


def planned(config: Any, arguments: argparse.Namespace, device: torch.device) -> tuple[Schedule, Any]:
    """The best schedule and partition for the costs of the model's layers on this machine; the same on every rank."""
    tokens, targets, side = arguments_of(0, arguments, config.vocab_size, device)
    layers = {name: zbkern.convert(chunk) for name, chunk in layer_chunks(config, device=device).items()}
    count, options = arguments.microbatches, ProfileOptions(slices=arguments.slices != 1)
    costs = profile_layers(layers, token_loss, tokens, targets, count, device=device, side=side, options=options)
    limit, slices = arguments.memory, arguments.slices
    found = plan(costs, dist.get_world_size(), count, memory_limit=limit, effort=2, slices=slices)
    choice = [(found.schedule, found.partition)]
    dist.broadcast_object_list(choice)  # machines may differ: all ranks take what rank 0 has found
    if dist.get_rank() == 0:
        slices = f", slices of {list(found.schedule.slices)} tokens" if len(found.schedule.slices) > 1 else ""
        print(f"planned: first layers {list(found.partition or ())}, idle {found.bubble_rate:.1%}{slices}", flush=True)
    return choice[0]


def train(arguments: argparse.Namespace) -> float | None:
    """Trains, evaluates and exports; the loss per token of the evaluation on the last chunk's rank."""
    torch.manual_seed(dist.get_rank())  # of dropout; weights have a seed of their own
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    weights = arguments.config
    config = transformers.AutoConfig.from_pretrained(weights) if weights else configuration(arguments.model)
    if arguments.schedule == "plan":
        schedule, partition = planned(config, arguments, device)
    else:
        make = getattr(schedules, arguments.schedule)
        schedule = make(dist.get_world_size(), arguments.microbatches, slices=arguments.slices)
        partition = None
    chunks = [zbkern.convert(chunk) for chunk in cut(config, schedule, partition, weights=weights, device=device)]
    pipe = Pipeline(chunks, schedule, token_loss, device=device)
    parameters = torch.nn.ModuleList(chunks).parameters()  # once each, also those that two chunks share
    optimizer = Optimizer(torch.optim.AdamW(parameters, lr=arguments.lr), pipe, max_norm=1.0)
    for step in range(arguments.steps):
        optimizer.zero_grad()
        loss = pipe.step(*arguments_of(step, arguments, config.vocab_size, device))
        optimizer.step()
        if loss is not None and (step % 20 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss per token {loss.item():.4f}", flush=True)
    loss = pipe.evaluate(*arguments_of(EVALUATION, arguments, config.vocab_size, device))
    if loss is not None:
        print(f"evaluation: loss per token {loss.item():.4f}", flush=True)
    export(arguments.out, pipe)
    pipe.close()
    if dist.get_rank() == 0:
        generate(arguments.out, config.vocab_size)
    return None if loss is None else loss.item()


def generate(folder: Path, vocabulary: int) -> None:
    """What the exported model says next."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens, mask, _ = batch(0, 1, 8, vocabulary)
    prompt = tokens[:, : int(mask.sum())]
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    print(f"after {prompt[0].tolist()} comes {found[0, prompt.shape[1] :].tolist()}", flush=True)


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama", "qwen3_moe"], default="llama")
    parser.add_argument("--config", help="folder with a configuration and weights, instead of --model")
    parser.add_argument("--schedule", choices=["plan", *schedules.NAMES], default="plan")
    parser.add_argument(
        "--slices", type=number_or_auto, default=1, help="of every sequence: a number, or auto for a plan"
    )
    parser.add_argument("--memory", type=float, metavar="BYTES", help="what a rank may hold, for --schedule plan")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="sequences per microbatch")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, default=Path("demo/exported"))
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc-per-node 2 examples/train_transformers.py")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    train(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
