"""The loss that a mixture of experts of the transformers library adds to balance its experts (`output_router_logits`).

It is a product of two sums over the routers of all layers: how often each expert was chosen, and how probable it was.
So every chunk adds the sums of its layers to those that come with the activations, and the last makes the loss of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.auxiliary_losses import add_loss


class RouterLosses:
    """The routers in some layers of a model, and what they add to its loss, which the library does not compute."""

    def __init__(self, whole: nn.Module, layers: Sequence[str]) -> None:
        recorded, self._top_k, self._coefficient = _settings(whole)
        self._index, self._runs = recorded.index, False
        self._found: list[tuple[nn.Module, Tensor]] = []
        for layer in layers:
            for name, part in whole.get_submodule(layer).named_modules(prefix=layer):
                if isinstance(part, recorded.target_class) and f".{recorded.layer_name or layer}." in f".{name}.":
                    part.register_forward_hook(self._note)

    def begin(self, side: dict[str, Any], carry: Any) -> dict[str, Any]:
        self._found.clear()
        self._runs = True
        return {**side, "output_router_logits": False}

    def end(self) -> None:
        self._runs = False  # else a layer runs alone, again in an R

    def sums(self, before: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """After it: the sums of the layers before, and of these; None where there are no routers yet.

        mask: [rows, length], 0 for padding. Raises ValueError for routers whose logits have lost their graph.
        """
        for router, logits in self._found:
            is_trained = any(parameter.requires_grad for parameter in router.parameters())
            if torch.is_grad_enabled() and is_trained and not logits.requires_grad:
                raise ValueError(
                    "cut: with output_router_logits checkpoints must not be reentrant, in which routers have no "
                    "gradient: activation_checkpointing_enable({'use_reentrant': False})"
                )
            own = _sums(logits, self._top_k, mask)
            before = own if before is None else before + own
        self._found.clear()
        return before

    def add(self, output: Any, sums: Tensor | None, carry: Any) -> Any:
        """What the last chunk returns, with the loss. carry: of a slice; behind the last comes the sequence's loss."""
        share = 1.0
        if carry is not None and sums is not None:
            state = carry.state(self)
            sums = sums if state is None else sums + state
            if not carry.is_last:
                carry.keep(self, sums)
                return output
            share = carry.end / (carry.end - carry.start)  # of all tokens to those of this slice, for which it counts
        if sums is None:  # of a layer alone
            return output
        leaves, structure = pytree.tree_flatten(output)
        leaves[0] = add_loss(leaves[0], share * self._coefficient * _loss(sums), "router_aux_loss")
        return pytree.tree_unflatten(leaves, structure)

    def _note(self, router: nn.Module, inputs: Any, output: Any) -> None:
        if self._runs:
            logits = output[self._index] if isinstance(output, tuple) else output
            self._found.append((router, logits.full_tensor() if isinstance(logits, DTensor) else logits))


def has_router_loss(model: Any) -> bool:
    """Whether its configuration asks for the loss. Raises ValueError where it is not the one that is known here."""
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return False
    if None in _settings(model) or not _is_known(getattr(sys.modules[type(model).__module__], _FUNCTION, None)):
        raise ValueError(
            f"layers_of: config.output_router_logits must be False for {type(model).__name__}: how it makes a loss of "
            "all layers, of which no rank has all, is not known; add a loss in its layers, with "
            "zbkern.pipeline.add_loss, or leave it out"
        )
    return True


_FUNCTION = "load_balancing_loss_func"


def _settings(model: Any) -> tuple[Any, Any, Any]:
    """What the library records as logits of routers, how many experts a token goes to, and what the loss counts for."""
    recorded = (getattr(each, "_can_record_outputs", None) or {} for each in model.modules())
    routers = next((outputs["router_logits"] for outputs in recorded if "router_logits" in outputs), None)
    config = model.config.get_text_config()
    names = "num_experts_per_tok", "router_aux_loss_coef"
    top_k, coefficient = (getattr(model, name, getattr(config, name, None)) for name in names)
    return routers if hasattr(routers, "target_class") else None, top_k, coefficient


def _is_known(function: Any) -> bool:
    """Whether this function makes of an example what this module makes of it."""
    layers = torch.arange(48, device="cpu").sin().view(2, 6, 4)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]], device="cpu")
    try:
        theirs = [function(tuple(layers), 4, 2, given) for given in (mask, None)]
    except Exception:  # of a function that takes other arguments, or is none
        return False
    ours = [_loss(_sums(layers[0], 2, given) + _sums(layers[1], 2, given)) for given in (mask, None)]
    return all(torch.allclose(one, other) for one, other in zip(ours, theirs, strict=True))


def _sums(logits: Tensor, top_k: int, mask: Tensor | None) -> Tensor:
    """[3 * experts]: how often each expert was chosen, the sum of its probabilities, and for each the number of tokens.

    logits: [tokens, experts]. In one dimension, as slices cut the second of what goes from chunk to chunk.
    """
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(top_k).indices
    counted = logits.new_ones(len(logits), dtype=torch.float32) if mask is None else mask.flatten().float()
    counts = counted.new_zeros(logits.shape[-1]).scatter_add(0, chosen.flatten(), counted.repeat_interleave(top_k))
    total = (probabilities.float() * counted[:, None]).sum(0)
    return torch.cat([counts, total, counted.sum().expand(len(counts))])


def _loss(sums: Tensor) -> Tensor:
    counts, probabilities, tokens = sums.chunk(3)
    return (counts / tokens * (probabilities / tokens)).sum() * len(counts)
