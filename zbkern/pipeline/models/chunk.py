"""A chunk of a model: layers of it under the names that they have there, run by the model's own forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbkern.pipeline.models.adapters import check_ties, plain_names
from zbkern.pipeline.models.arguments import LibraryArguments, check_sliceable, split_batch
from zbkern.pipeline.models.deferred_logits import Head
from zbkern.pipeline.models.halves import Halves
from zbkern.pipeline.models.layers import encoder_of, is_transformer, name_in
from zbkern.pipeline.models.rewritten import Place, Rewrite, Rewritten
from zbkern.pipeline.models.router_losses import RouterLosses, has_router_loss
from zbkern.pipeline.models.stand_ins import OF_WHOLE_MODELS, Flow, refuse
from zbkern.pipeline.models.whole_lengths import WholeLengths


class Chunk(nn.Module):
    """Layers of a model from first to before last, under the names that they have there. `cut` makes them.

    whole: the model, without the layers of others. names: of all layers. first, last: 4.5 is between attention and MLP
    of layer 4. shared: {label: name of the parameter here} of what several layers share, label being its name in the
    first of them. elsewhere: {name of what stands beside the layers and is a placeholder here: the layer in whose chunk
    it is}, parameters and modules. halves: of blocks of which another chunk has one.
    tied_elsewhere: of the names of `shared`, those that another chunk has, too. skips: the layers up to the last whose
    outputs later chunks take.
    The first chunk takes what the model takes, any other what the one before returns, and all take keyword arguments
    of the model besides (side inputs). The last returns what the model returns, of the transformers library its logits.
    """

    whole: Any  # the copy of the model

    def __init__(
        self,
        whole: nn.Module,
        flow: Flow,
        names: Sequence[str],
        first: float,
        last: float,
        shared: Mapping[str, str],
        elsewhere: Mapping[str, str],
        halves: Mapping[str, Halves],
        tied_elsewhere: Sequence[str],
        skips: Sequence[str],
    ) -> None:
        super().__init__()
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = whole.__dict__[kind]  # one dict for both: names, moves and casts are the model's
        self.__dict__["whole"] = whole  # not as a submodule, which would be in all names
        self.training = whole.training
        encoder = encoder_of(whole)
        encoder_layers = sum(name.startswith(f"{encoder}.") for name in names) if encoder else 0
        self._place = place = Place(names, first, last, encoder_layers)
        self.layer_names, self.all_layers, self.begins_at = place.layers, names, first
        self.shared_names, self._tied_elsewhere = dict(shared), tied_elsewhere
        # DistributedDataParallel would broadcast into placeholders, which have no memory of their own
        self._ddp_params_and_buffers_to_ignore = list(elsewhere)
        self.tensor_names = plain_names(self)  # what is wrapped later has others
        self._routers: RouterLosses | None = None
        head, rewrites = names[-1], list[Rewrite]()
        if is_transformer(whole):
            if first > 0 or not place.is_last:
                whole.__dict__.update({method: partial(refuse, method) for method in OF_WHOLE_MODELS})
            if place.is_last:
                head = name_in(whole, self.whole.get_output_embeddings())
            rewrites += WholeLengths(whole, place.layers), LibraryArguments(whole, place)
            if has_router_loss(whole):
                self._routers = RouterLosses(whole, place.layers)
                rewrites.append(self._routers)
        self._head = Head(self, head if head in place.layers else "")
        rewrites.append(self._head)
        self._rewritten = Rewritten(whole, place, flow, elsewhere, halves, skips, rewrites)

    @property
    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that several layers hold, by one name for all: a Pipeline sums gradients over their ranks.

        Of a layer whose copy peft trains instead (`modules_to_save`), the layer's own. Raises ValueError for an adapter
        that should be tied, and was made after the model was cut.
        """
        check_ties(self, self._tied_elsewhere)
        tied = {}
        for label, name in self.shared_names.items():
            layer, _, key = name.rpartition(".")
            module = self.get_submodule(layer)
            tied[label] = getattr(module, "original_module", module).get_parameter(key)
        return tied

    def split_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of a batch by the names of the model's arguments, what the first chunk alone takes, and what all take."""
        return split_batch(self.whole, self._place.encoder_layers > 0, batch)

    def check_sliceable(self) -> None:
        """Raises TypeError or ValueError where sequences cannot come in slices, as in a schedule that has them."""
        if is_transformer(self.whole):
            check_sliceable(self.whole)
        elif "carry" not in inspect.signature(self.whole.forward).parameters:
            raise TypeError(
                f"cut: {type(self.whole).__name__} must take the keyword argument carry to run sequences in slices, "
                "and hand it to its layers; or use a schedule without slices"
            )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`torch.nn.Module.compile` of its layers one by one: placeholders for the others end a forward in ways that a
        compiler does not follow, and equal layers share their code. A layer without parts, a norm, stays as it is."""
        for layer in map(self.get_submodule, self.layer_names):
            if next(layer.children(), None) is not None:
                layer.compile(*args, **kwargs)
        self._rewritten.around_compiled()

    @contextmanager
    def deferred_logits(self) -> Iterator[None]:
        """Inside, the last chunk may give `DeferredLogits` in the place of logits: for a loss that takes them."""
        self._head.may_wait = True
        try:
            yield
        finally:
            self._head.may_wait = False

    def train(self, mode: bool = True) -> Chunk:
        self.whole.training = mode
        return super().train(mode)

    def forward(
        self,
        *inputs: Any,
        passed: Any = None,
        routed: Any = None,
        skipped: Mapping[str, Any] | None = None,
        **side: Any,
    ) -> Any:
        if torch.compiler.is_compiling():
            _refuse_to_compile()
        received = passed if passed is not None else inputs[0] if inputs else None
        output, skipped = self._rewritten(received, skipped, inputs, side)
        if self._routers is not None:
            routed = self._routers.sums(routed, side.get("attention_mask"))
        if self._place.is_last:
            return output if self._routers is None else self._routers.add(output, routed, side.get("carry"))
        given = {"passed": output, "routed": routed, "skipped": skipped or None}
        given = {name: value for name, value in given.items() if value is not None}
        return output if isinstance(output, Tensor) and len(given) == 1 else given


@torch.compiler.disable(reason="a chunk of cut compiles its layers one by one, by chunk.compile()")
def _refuse_to_compile() -> None:
    """Not compiled itself: an error that dynamo meets while it traces is reported as its own."""
    raise TypeError(
        "cut: a chunk compiles its layers one by one, and not as a part of torch.compile(...): call compile() of the "
        "chunk that `cut` made"
    )
