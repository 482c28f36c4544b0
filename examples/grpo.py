# torchrun --nproc-per-node 4 grpo.py MODEL_FOLDER REPLICAS STEPS: GRPO of a policy that learns to say one token
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import zbkern
from zbkern import pipeline

TOKEN, GROUP, END = 5, 4, 1  # the rewarded token; answers to a prompt; the token that ends one
COSTS = pipeline.Costs(2.0, 3.5, 1.0, attention_forward=1.0, attention_backward=2.5, overhead=0.01, tokens=32)


def rollouts(engine, step):
    """(tokens, tokens that follow each, advantage) of each answer; all processes sample the same, with one seed."""
    torch.manual_seed(step)
    found = []
    for length in (3, 7, 11):
        prompt = torch.randint(2, engine.config.vocab_size, (1, length))
        answers = engine.generate(prompt, do_sample=True, max_new_tokens=24, num_return_sequences=GROUP, pad_token_id=0)
        rows = [row[: length + [*row[length:].tolist(), END].index(END) + 1] for row in answers]
        rewards = torch.stack([(row[length:] == TOKEN).float().mean() for row in rows])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        next_tokens = [torch.cat([torch.full((length - 1,), -100), row[length:], torch.tensor([-100])]) for row in rows]
        found += zip(rows, next_tokens, advantages.tolist(), strict=True)
    return found


def policy_loss(logits, target):
    """Of one answer: the mean over its tokens; where there are no old log-probabilities, these."""
    tokens, advantage, old, ratios = target
    log_probs = pipeline.token_log_probs(logits, tokens[None])[0][0]
    if old is None:
        return log_probs
    ratio = (log_probs - old).exp()
    ratios.append((ratio.detach() - 1).abs().max().item())
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain[tokens != -100].mean()


def main(folder, replicas, steps):
    """Of each inner step the loss and how far a ratio is from 1, on ranks with the last chunk; and the weights."""
    stages = torch.distributed.get_world_size() // replicas
    mesh = torch.distributed.init_device_mesh(
        "cpu", (replicas, stages), mesh_dim_names=("replica", "stage")
    )  # "cuda" on GPUs
    replica, stage = mesh.get_coordinate()
    schedule, config = pipeline.schedules.zb_v(stages, stages), AutoConfig.from_pretrained(folder)
    chunks = [zbkern.convert(c.float()) for c in pipeline.cut(config, schedule, weights=folder, rank=stage)]
    chunks = [torch.nn.parallel.DistributedDataParallel(c, process_group=mesh.get_group("replica")) for c in chunks]
    adamw = torch.optim.AdamW(torch.nn.ModuleList(chunks).parameters(), lr=3e-3)
    engine, log, ratios = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False), [], []
    with pipeline.Pipeline(chunks, schedule, pipeline.per_sequence(policy_loss), mesh.get_group("stage")) as pipe:
        optimizer = pipeline.Optimizer(adamw, pipe, max_norm=0.5)
        for step in range(steps):
            for name, weight in pipeline.full_weights(pipe):
                engine.get_parameter(name).copy_(weight)
            data = rollouts(engine, step)
            how = {"sequences": len(data), "multiple": 8, "replica": replica, "replicas": replicas}
            (batch,) = pipeline.PlannedBatches([row.tolist() for row, _, _ in data], COSTS, stages, **how)
            answers = [(*data[number][1:], None, ratios) for number in batch.sequences]
            given = batch.inputs, pipeline.sequence_targets(answers, batch.plan), batch.side
            olds = pipe.forward(*given, schedule=batch.plan.schedule) or [None] * len(answers)
            answers = [(*answer[:2], old, ratios) for answer, old in zip(answers, olds, strict=True)]
            targets = pipeline.sequence_targets(answers, batch.plan, sequences=len(data) / replicas)
            for _ in range(2):
                ratios.clear()
                optimizer.zero_grad()
                loss = pipe.step(batch.inputs, targets, batch.side, schedule=batch.plan.schedule)
                optimizer.step()
                if loss is not None:
                    log.append((loss.item(), max(ratios)))
                    print(f"step {step}: loss {log[-1][0]:.4f}, ratios within {log[-1][1]:.2g} of 1", flush=True)
        return log, {name: weight.clone() for name, weight in pipeline.full_weights(pipe)}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
