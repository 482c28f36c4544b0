# torchrun --nproc-per-node 2 finetune.py MODEL_FOLDER TEXT_FILE OUT_FOLDER
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

import zbkern
from zbkern.pipeline import Optimizer, Pipeline, cut, export, schedules, token_loss, token_targets

model, text, out = sys.argv[1:]
torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
schedule = schedules.zb_v(stages=torch.distributed.get_world_size(), microbatches=4)
chunks = cut(AutoConfig.from_pretrained(model), schedule, weights=model)
chunks = [zbkern.convert(chunk.float()) for chunk in chunks]  # 16 bits would round small steps away
pipe = Pipeline(chunks, schedule, token_loss)
parameters = torch.nn.ModuleList(chunks).parameters()  # a tied weight once
optimizer = Optimizer(torch.optim.AdamW(parameters, lr=1e-3), pipe, max_norm=1.0)  # the norm over all ranks

tokenizer, lines = AutoTokenizer.from_pretrained(model), Path(text).read_text().splitlines()
for first in range(0, len(lines) - 7, 8):
    batch = tokenizer(lines[first : first + 8], padding=True, return_tensors="pt")  # the same batch on every rank
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer.zero_grad()
    loss = pipe.step(dict(batch), token_targets(labels, schedule.microbatches))
    optimizer.step()
    if loss is not None:  # on the rank of the last chunk
        print(f"lines {first} to {first + 7}: loss {loss.item():.4f}", flush=True)
export(out, pipe)  # from_pretrained(out) reads it
if torch.distributed.get_rank() == 0:
    tokenizer.save_pretrained(out)
    print(f"wrote the model and its tokenizer to {out}", flush=True)
pipe.close()
