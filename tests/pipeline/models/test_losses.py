"""The loss per token: the mean over labelled tokens of the whole step, whatever each microbatch has of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from zbkern.pipeline import token_loss, token_targets


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_it_is_the_mean_over_all_tokens(shift: bool, microbatches: int) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    labels[0] = labels[1, 2:] = labels[3, :4] = -100  # the first microbatch of four has none at all
    targets = token_targets(labels, microbatches, shift=shift)
    parts = zip(logits.chunk(microbatches), targets, strict=True)
    loss = sum(token_loss(part, target) for part, target in parts) / microbatches
    outputs, wanted = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    torch.testing.assert_close(loss, F.cross_entropy(outputs.flatten(0, 1), wanted.flatten(), ignore_index=-100))


@pytest.mark.parametrize("shift", [True, False])
def test_microbatches_of_several_sizes(shift: bool) -> None:
    """A last batch that is not whole, or rows sorted by length: the mean is still over all tokens."""
    torch.manual_seed(0)
    labels = [torch.randint(7, shape) for shape in [(2, 5), (1, 9), (3, 4)]]
    labels[1][:, 4:] = -100
    logits = [torch.randn(*part.shape, 7) for part in labels]
    loss = sum(map(token_loss, logits, token_targets(labels, 3, shift=shift))) / 3
    outputs = [part[:, :-1] if shift else part for part in logits]
    wanted = [part[:, 1:] if shift else part for part in labels]
    flat = torch.cat([part.flatten(0, 1) for part in outputs]), torch.cat([part.flatten() for part in wanted])
    torch.testing.assert_close(loss, F.cross_entropy(*flat, ignore_index=-100))


@pytest.mark.parametrize("labels", [torch.zeros(2, 3, dtype=torch.long), [torch.zeros(2, 3, dtype=torch.long)], None])
def test_labels_as_they_are_need_token_targets(labels: Any) -> None:
    """Two rows of labels would pass for labels and their weight."""
    with pytest.raises(TypeError, match=r"token_loss: targets must be what token_targets.*gives; got"):
        token_loss(torch.randn(2, 3, 5), labels)


def test_no_token_counts() -> None:
    (target,) = token_targets(torch.full((2, 3), -100), 1)
    logits = torch.randn(2, 3, 5, requires_grad=True)
    token_loss(logits, target).backward()
    assert not logits.grad.any()


@pytest.mark.parametrize("tokens", [torch.tensor(12), 12, 0.125])  # fewer than there are replicas
def test_the_number_of_tokens_of_all_replicas(tokens: Any) -> None:
    labels = torch.randint(5, (2, 3))
    (target,) = token_targets(labels, 1, shift=False, tokens=tokens)
    logits = torch.randn(2, 3, 5)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * 6 / float(tokens)
    torch.testing.assert_close(token_loss(logits, target), expected)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(4, 3), r"integers \[rows, length\], or a list of such; got torch.float32 \[4, 3\]"),
        (torch.zeros(4, dtype=torch.long), r"got torch.int64 \[4\]"),
        (None, "got None"),
        (torch.zeros(3, 3, dtype=torch.long), "a multiple of 2 rows, the microbatches, or be a list of .*; got 3"),
        ([torch.zeros(3, 3, dtype=torch.long)], "a list of 2 microbatches; got 1"),
        ([torch.zeros(3, 3, dtype=torch.long), torch.zeros(3, dtype=torch.long)], r"got torch.int64 \[3\]"),
    ],
)
def test_bad_labels(labels: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        token_targets(labels, 2)
