"""A step from its call to its validation: what it was called with, in place again, and whether that is still so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline.optimizer.params import copied, equal, hyperparameters, parameters
from zbkern.pipeline.transport.tensors import local_part
from zbkern.wgrad.checksums import are_same, sums_of


class PendingStep:
    """What a step was called with, kept until it is validated, so that it can be done later, or again.

    gradients: (parameter, its gradient) of all that have one, as the torch optimizer is to see them. before, after:
    hyperparameters of every group when the step was called, and when it returned. has_stepped: whether it has
    been done already.
    """

    def __init__(self, gradients: list[tuple[Tensor, Tensor]], before: list[dict[str, Any]]) -> None:
        self.before = self.after = before
        self.has_stepped = False
        self._weights: list[tuple[Tensor, int]] = []
        self._values: list[tuple[Tensor, int, list[Tensor]]] = []
        self.set_gradients(gradients)

    def set_gradients(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        """Keeps these gradients from now on; none for a step that will not be done again."""
        self.gradients = gradients
        self._versions = [gradient._version for _, gradient in gradients]

    def copy_gradients(self, which: Iterable[Tensor]) -> None:
        """Keeps copies in the place of those gradients that are among these tensors, which others will write into."""
        shared = {id(tensor) for tensor in which}
        self._check_unchanged()
        self.set_gradients(
            [(p, gradient.clone() if id(gradient) in shared else gradient) for p, gradient in self.gradients]
        )

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Copies of the gradients, for `take_copies`."""
        return [(parameter, gradient.clone()) for parameter, gradient in self.gradients]

    def take_copies(self, copies: list[tuple[Tensor, Tensor]] | None) -> bool:
        """After the step: whether it has written into gradients, in whose place copies from before it are kept then."""
        versions = [gradient._version for _, gradient in self.gradients]
        if versions != self._versions and copies is not None:
            self.set_gradients(copies)
        return versions != self._versions

    def record_weights(self, weights: Iterable[Tensor], values: bool) -> None:
        """For `check_weights`: what they are now, when the step is left to be validated. values: for `check_values`,
        too, with a copy of no tensor."""
        self._weights = [(weight, weight._version) for weight in weights]
        tensors = [weight for weight, _ in self._weights] + [gradient for _, gradient in self.gradients]
        self._values = [(each, each._version, sums_of([local_part(each.detach())])) for each in tensors if values]

    @property
    def weights(self) -> list[Tensor]:
        """The weights that `record_weights` was given."""
        return [weight for weight, _ in self._weights]

    def check_values(self) -> None:
        """Raises RuntimeError where a weight or gradient was written in a way that torch does not count."""
        for tensor, version, sums in self._values:
            if tensor._version == version and not are_same(sums, sums_of([local_part(tensor.detach())])):
                raise RuntimeError(
                    f"Optimizer.validate: a weight or gradient of shape {list(tensor.shape)} was changed after step() "
                    "through .data or NumPy, and would be lost where the step is clipped or skipped; call "
                    "Optimizer.validate() first"
                )

    def check_weights(self) -> None:
        """Raises RuntimeError where a weight is another one than the step has left."""
        for weight, version in self._weights:
            if weight._version != version:
                raise RuntimeError(
                    f"Optimizer.validate: a weight of shape {list(weight.shape)} was changed after step(), which only "
                    "now is done, or taken back: the change would come before it, or be lost; call "
                    "Optimizer.validate() first"
                )

    def _check_unchanged(self) -> None:
        for (_, gradient), version in zip(self.gradients, self._versions, strict=True):
            if gradient._version != version:
                raise RuntimeError(
                    f"Optimizer.validate: the gradient of a parameter of shape {list(gradient.shape)} was changed in "
                    "place after step(), which now has to be redone with it; clear gradients by Optimizer.zero_grad(), "
                    "or call Optimizer.validate() first"
                )

    @contextmanager
    def in_place(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """With the gradients and hyperparameters that the step was called with; afterwards everything is as it was.

        But for hyperparameters that the step itself has changed inside, and that nobody has set since it was called.
        """
        self._check_unchanged()
        wanted = {id(parameter): gradient for parameter, gradient in self.gradients}
        replaced = []
        for parameter in parameters(optimizer):
            present, gradient = parameter.grad, wanted.get(id(parameter))
            if present is not gradient:
                replaced.append((parameter, present))
                parameter.grad = gradient
        objects, values = [dict(group) for group in optimizer.param_groups], hyperparameters(optimizer)
        for group, setting in zip(optimizer.param_groups, self.before, strict=True):
            for name in group.keys() - setting.keys() - {"params"}:  # which a step adds, as counts in its first one
                del group[name]
            _assign(group, setting)
        try:
            yield
        finally:
            for parameter, present in replaced:
                parameter.grad = present
            for group, now, value, after in zip(optimizer.param_groups, objects, values, self.after, strict=True):
                changed = {name: v for name, v in value.items() if name not in after or not equal(v, after[name])}
                group.update({name: now[name] for name in changed})
                _assign(group, changed)


def _assign(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Sets hyperparameters; those that are tensors in place, where a schedule or a CUDA graph may have them."""
    for name, value in settings.items():
        present = group.get(name)
        if isinstance(value, Tensor) and isinstance(present, Tensor):
            with torch.no_grad():
                present.copy_(value)
        else:
            group[name] = copied(value)
