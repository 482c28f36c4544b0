# torchrun --nproc-per-node 2 dpo.py MODEL_FOLDER PAIRS_FILE OUT_FOLDER: DPO of {"prompt", "chosen", "rejected"} by line
import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

import zbkern
from zbkern import pipeline

BETA, PAIRS = 0.1, 8  # pairs of a step; what passes take is measured by `profile`, or guessed:
COSTS = pipeline.Costs(2.0, 3.5, 1.0, attention_forward=1.0, attention_backward=2.5, overhead=0.01, tokens=64)


def pair_of(line, tokenizer):
    """Of each answer, behind its prompt, the tokens and those that follow them, -100 where these do not count."""
    texts, end = json.loads(line), [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    prompt = tokenizer(texts["prompt"]).input_ids
    answers = [tokenizer(texts[kind], add_special_tokens=False).input_ids + end for kind in ("chosen", "rejected")]
    following = [[-100] * (len(prompt) - 1) + answer + [-100] for answer in answers]
    return [torch.tensor(prompt + answer) for answer in answers], [torch.tensor(each) for each in following]


@pipeline.loss_traits(takes_deferred_logits=True)
def dpo(logits, target):
    """Of one pair; where there are no log-probabilities of the reference, these."""
    following, reference = target
    log_probs = pipeline.token_log_probs(logits, torch.cat(following)[None])[0][0]
    both = torch.stack([part.sum() for part in log_probs.split([*map(len, following)])])
    if reference is None:
        return both
    chosen, rejected = both - reference
    return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected))


def planned(pairs, stages):
    """(inputs, plan, following tokens) of a step: two sequences of a pack are one for the plan."""
    lengths = [sum(map(len, answers)) for answers, _ in pairs]
    plan = pipeline.plan_batch(lengths, COSTS, stages, multiple=max(lengths))  # so long that no pair is in slices
    inputs = []
    for row in plan.rows:
        answers = [answer for number in row for answer in pairs[number][0]]
        positions = torch.cat([torch.arange(len(answer)) for answer in answers])
        inputs.append({"input_ids": torch.cat(answers)[None], "position_ids": positions[None]})
    return inputs, plan, [following for _, following in pairs]


def main(folder, file, out):
    """The loss of each step, on the rank of the last chunk."""
    stages, tokenizer = torch.distributed.get_world_size(), AutoTokenizer.from_pretrained(folder)
    schedule = pipeline.schedules.zb_v(stages, stages)  # of which only the places of the chunks count
    chunks = pipeline.cut(AutoConfig.from_pretrained(folder), schedule, weights=folder)
    chunks = [zbkern.convert(chunk.float()) for chunk in chunks]
    pairs = [pair_of(line, tokenizer) for line in Path(file).read_text().splitlines()]
    steps = [planned(pairs[first : first + PAIRS], stages) for first in range(0, len(pairs), PAIRS)]
    references, losses = [], []
    with pipeline.Pipeline(chunks, schedule, pipeline.per_sequence(dpo)) as pipe:
        adamw = torch.optim.AdamW(torch.nn.ModuleList(chunks).parameters(), lr=1e-3)
        optimizer = pipeline.Optimizer(adamw, pipe, max_norm=1.0)
        for inputs, plan, following in steps:  # of the weights as they are
            targets = pipeline.sequence_targets([(each, None) for each in following], plan)
            references.append(pipe.forward(inputs, targets, schedule=plan.schedule) or [None] * len(following))
        for (inputs, plan, following), reference in zip(steps, references, strict=True):
            targets = pipeline.sequence_targets([*zip(following, reference, strict=True)], plan)
            optimizer.zero_grad()
            loss = pipe.step(inputs, targets, schedule=plan.schedule)
            optimizer.step()
            if loss is not None:
                losses.append(loss.item())
                print(f"{len(following)} pairs in {len(plan.rows)} microbatches: loss {losses[-1]:.4f}", flush=True)
        pipeline.export(out, pipe)
    return losses


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
    main(*sys.argv[1:])
