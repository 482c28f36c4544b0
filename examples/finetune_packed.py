# torchrun --nproc-per-node 2 finetune_packed.py MODEL_FOLDER TEXT_FILE OUT_FOLDER
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

import zbkern
from zbkern.pipeline import (
    Optimizer,
    Pipeline,
    PlannedBatches,
    ProfileOptions,
    as_packs,
    cut,
    export,
    profile,
    schedules,
    token_loss,
    token_targets,
)

model, text, out = sys.argv[1:]
torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
ranks = torch.distributed.get_world_size()
schedule = schedules.zb_v(stages=ranks, microbatches=ranks)  # of which only the places of the chunks count
chunks = [zbkern.convert(chunk.float()) for chunk in cut(AutoConfig.from_pretrained(model), schedule, weights=model)]
tokenizer = AutoTokenizer.from_pretrained(model)
dataset = [tokenizer(line).input_ids for line in Path(text).read_text().splitlines()]

sample = torch.tensor([max(dataset, key=len)] * ranks)  # what passes take is measured on the longest sequence
options = ProfileOptions(slices=True, packs=as_packs(sample, 4))  # and how much longer packs take under a mask
sample_targets = token_targets(sample, ranks)
costs = profile(chunks, schedule.placement, token_loss, {"input_ids": sample}, sample_targets, ranks, options=options)

pipe = Pipeline(chunks, schedule, token_loss)
parameters = torch.nn.ModuleList(chunks).parameters()  # a tied weight once
optimizer = Optimizer(torch.optim.AdamW(parameters, lr=1e-3), pipe, max_norm=1.0)
for batch in PlannedBatches(dataset, costs, ranks, sequences=32):  # the same on every rank
    optimizer.zero_grad()
    loss = pipe.step(batch.inputs, batch.targets, batch.side, schedule=batch.plan.schedule)
    optimizer.step()
    if loss is not None:  # on the rank of the last chunk
        print(
            f"{len(batch.sequences)} sequences in {len(batch.inputs)} microbatches: loss {loss.item():.4f}", flush=True
        )
export(out, pipe)
if torch.distributed.get_rank() == 0:
    tokenizer.save_pretrained(out)
    print(f"wrote the model and its tokenizer to {out}", flush=True)
pipe.close()
