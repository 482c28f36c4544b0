"""Sequences of unequal lengths in one process, one after the other."""

from __future__ import annotations

import torch
from torch import nn


def one_process(model: nn.Module, sequences: list[dict[str, list[int]]]) -> float:
    """The mean loss over all labelled tokens, sequence by sequence; leaves the gradients."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sequence in sequences:
        tokens, labels = (torch.tensor(sequence[name])[None] for name in ("input_ids", "labels"))
        logits = model(input_ids=tokens).logits[0, :-1]
        total = total + nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
        count += int((labels[0, 1:] != -100).sum())
    (total / max(count, 1)).backward()
    return (total / max(count, 1)).item()
