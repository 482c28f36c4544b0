"""A model's own forward in a chunk: what it does in another way there, around every run of it, and its errors.

Whatever a forward does besides its layers (positions, masks, rotary embeddings) it does in every chunk. The layer
before the chunk's first gives what was received, the layer after its last ends the forward, and those before give
placeholders, so that a model that uses more of them than the last one's output cannot go wrong in silence. All else
that is other in a chunk is a `Rewrite`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zbkern.pipeline.models.deferred_logits import deferred
from zbkern.pipeline.models.families import pools_by_padding
from zbkern.pipeline.models.halves import CallCheck, Halves
from zbkern.pipeline.models.layers import encoder_of, is_transformer, is_within
from zbkern.pipeline.models.placeholders import PlaceholderUsed, placeholder, refuse_placeholders
from zbkern.pipeline.models.stand_ins import GIVE_TOKENS, ArgumentElsewhere, Flow, Reached, result_of
from zbkern.pipeline.transport.tensors import tensors_in


class Rewrite(Protocol):
    """What is other in the forward of a chunk, while it runs: arguments, modules, or what hooks of its own do."""

    def begin(self, side: dict[str, Any], carry: Any) -> dict[str, Any]:
        """Before a forward: from the side inputs, and the carry of a slice or None, those that the model gets."""
        ...

    def end(self) -> None:
        """After it, also where it has failed."""
        ...


class Place(NamedTuple):
    """Of a chunk in its model: the names of all layers; its first layer, 4.5 for the half of one, and the one after its
    last; of the layers before it, and of these, how many an encoder has."""

    names: Sequence[str]
    first: float
    last: float
    encoder_layers: int

    @property
    def layers(self) -> Sequence[str]:
        """The chunk's own."""
        return self.names[int(self.first) : ceil(self.last)]

    @property
    def is_last(self) -> bool:
        return self.last == len(self.names)


class Rewritten:
    """The forward of a chunk's copy of the model.

    elsewhere: {name of what stands beside the layers and is a placeholder here: the layer in whose chunk it is}.
    halves: of blocks of which another chunk has one. skips: the layers up to the last whose outputs later chunks take.
    rewrites: begin in this order.
    """

    def __init__(
        self,
        whole: Any,
        place: Place,
        flow: Flow,
        elsewhere: Mapping[str, str],
        halves: Mapping[str, Halves],
        skips: Sequence[str],
        rewrites: Sequence[Rewrite],
    ) -> None:
        self.whole, self._place, self._flow, self._elsewhere, self._rewrites = whole, place, flow, elsewhere, rewrites
        self._checked = False
        flow.first, flow.last = place.layers[0], place.layers[-1]
        if place.first % 1:
            block = whole.get_submodule(flow.first)
            flow.kind, flow.argument = type(block), next(iter(inspect.signature(block.forward).parameters))
            self._entering = block.register_forward_pre_hook(flow.enter_inside, with_kwargs=True)
        self._call_checks = {name: CallCheck(name, each) for name, each in halves.items()}
        for name, check in self._call_checks.items():
            whole.get_submodule(name).register_forward_pre_hook(check, with_kwargs=True)
        for name in place.layers:
            whole.get_submodule(name).register_forward_pre_hook(_refusal_of(name), with_kwargs=True)
        encoder = encoder_of(whole)
        self._skips = [name for name in skips if name != place.layers[-1] or place.last % 1]  # that one is sent anyway
        before = place.names[int(place.first) - 1] if place.first and not place.first % 1 else ""
        self._received_as = [before] if before in self._skips else []
        mine = (name for name in self._skips if name in place.layers)
        self._last_hooks: dict[str, Any] = {name: partial(flow.skip, name) for name in mine}
        if not place.is_last:
            # of an encoder's last layer with what the encoder does after it
            leaving = encoder if place.last == place.encoder_layers else flow.last
            self._last_hooks[leaving] = flow.leave
            self._before_last = whole.get_submodule(leaving).register_forward_pre_hook(flow.before_last)
        self._handles = {
            name: whole.get_submodule(name).register_forward_hook(h) for name, h in self._last_hooks.items()
        }
        self._encoder = encoder  # all chunks with layers of the decoder take its output: a skip up to the last one
        if place.first == place.encoder_layers > 0:
            self._received_as.append(encoder)
        if 0 < place.encoder_layers < place.last and not place.is_last:
            self._skips.append(encoder)
            if place.first < place.encoder_layers:
                whole.get_submodule(encoder).register_forward_hook(partial(flow.skip_states, encoder))

    def around_compiled(self) -> None:
        """Has compiled calls of halves of blocks do what their hooks do."""
        for name, check in self._call_checks.items():
            block: Any = self.whole.get_submodule(name)
            block._compiled_call_impl = partial(check.around, block, block._compiled_call_impl)
        if self._place.first % 1:
            first: Any = self.whole.get_submodule(self._place.layers[0])
            first._compiled_call_impl = partial(self._flow.call_inside, first, first._compiled_call_impl)

    def __call__(
        self, received: Any, skipped: Mapping[str, Any] | None, inputs: Any, side: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """What the last of the layers gives, and what later chunks take besides."""
        skipped = {**(skipped or {}), **dict.fromkeys(self._received_as, received)}
        self._flow.begin(None if self._place.first == 0 else received, skipped)
        try:
            output, skipped = self._outputs(inputs, side)
            if not self._checked:
                self._check(received, output)
                self._checked = True
            return output, skipped
        finally:
            self._flow.begin(None)

    def _outputs(self, inputs: Any, side: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        flow, place, given = self._flow, self._place, side
        self._order_hooks()
        try:
            with ExitStack() as stack:
                stack.callback(flow.end)
                for each in self._rewrites:
                    stack.callback(each.end)
                    given = each.begin(given, side.get("carry"))
                flow.runs = True
                output = self._run(inputs, given)
        except Reached:
            output = None
        except Exception as error:
            if (explained := self._explained(error, side)) is not None:
                raise explained from error
            raise
        if not place.is_last:
            if not flow.left:
                before, after = place.layers[-1], flow.ended or place.names[int(place.last)]
                raise ValueError(
                    f"cut: layer {before!r} must run before {after!r}; it did not: name the layers in the order in "
                    "which they run, each called once in every forward"
                )
            output = flow.sent
        elif place.first > 0 and not flow.entered:
            raise ValueError(
                f"cut: layer {place.names[ceil(place.first) - 1]!r} must be called in every forward; it was not: name "
                "modules that the forward calls"
            )
        else:
            output = deferred(result_of(output))
        skipped = flow.skips.of(self._skips)
        try:
            refuse_placeholders((output, skipped))
        except PlaceholderUsed as error:
            raise self._of_another(error, side) from error
        return output, skipped

    def _order_hooks(self) -> None:
        """Has the first hook put in what was received, before those of `fully_shard`, say, which are for that; and the
        last ones take what is sent: theirs are for that, too, and what goes into the layer is what backward hooks see.

        A layer may have been wrapped since, and the wrapper gets the hook.
        """
        if self._place.first % 1:
            hooks = self.whole.get_submodule(self._flow.first)._forward_pre_hooks
            if self._entering.id in hooks:
                hooks.move_to_end(self._entering.id, last=False)
        for name, hook in self._last_hooks.items():
            layer = self.whole.get_submodule(name)
            if self._handles[name].id not in layer._forward_hooks:
                self._handles[name].remove()
                self._handles[name] = layer.register_forward_hook(hook)
            layer._forward_hooks.move_to_end(self._handles[name].id)
            if hook == self._flow.leave:
                if self._before_last.id not in layer._forward_pre_hooks:
                    self._before_last.remove()
                    self._before_last = layer.register_forward_pre_hook(self._flow.before_last)
                layer._forward_pre_hooks.move_to_end(self._before_last.id)

    def _run(self, inputs: Any, side: dict[str, Any]) -> Any:
        place = self._place
        names = [*inspect.signature(self.whole.forward).parameters]
        own = names[0] if names else None
        if place.first >= place.encoder_layers > 0:
            side["encoder_outputs"] = self._encoder_outputs()
            return self.whole(**side)
        if own in side:  # on every rank, and so in the place of what the first has
            return self.whole(**side)
        if place.first == 0:
            if not place.is_last:
                _refuse_positions(inputs, names)
            return self.whole(*inputs, **side)
        if not is_transformer(self.whole) or "input_ids" in side or "inputs_embeds" not in names:
            return self.whole(ArgumentElsewhere(own), **side)
        if place.is_last and pools_by_padding(self.whole):
            raise ValueError(
                f"cut: {type(self.whole).__name__} pools by its padding, which token ids show, and would take the last "
                f"token of each row without them: {GIVE_TOKENS}"
            )
        if place.first == 1:  # the embedding is all that other chunks have done
            return self.whole(inputs_embeds=self._flow.enter(place.names[0]), **side)
        return self.whole(inputs_embeds=self._no_embeddings(), **side)

    def _encoder_outputs(self) -> Any:
        """What the encoder gave, for a chunk that has none of its layers and does not run its forward."""
        from transformers.modeling_outputs import MoEModelOutput

        if self._place.first == self._place.encoder_layers:
            self._flow.enter(self._place.names[int(self._place.first) - 1])
        # Switch Transformers read its router_logits
        return MoEModelOutput(last_hidden_state=self._flow.skips[self._encoder])

    def _no_embeddings(self) -> Tensor:
        """A placeholder in the shape of embeddings. What blocks pass on may have one dimension more."""
        given = self._flow.tensor_like_received(self._place.names[0])
        if given.dim() <= 3:
            return given
        hidden_size = self.whole.config.get_text_config().hidden_size
        like = torch.empty((), dtype=given.dtype, device=given.device).expand(*given.shape[:2], hidden_size)
        return placeholder(like, self._place.names[0])

    def _explained(self, error: Exception, side: dict[str, Any]) -> ValueError | None:
        """The error to raise in place of one that layers elsewhere cause; None for one that explains itself."""
        if isinstance(error, PlaceholderUsed):
            return self._of_another(error, side)
        if str(error).startswith("cut: "):
            if not isinstance(error, AttributeError):  # of a stand-in
                return None
            tokens = f"if it does so for want of token ids, {GIVE_TOKENS}"
            loss = "have layers return what others use; a loss of theirs is added there, zbkern.pipeline.add_loss"
            return ValueError(f"{error}: {tokens if is_transformer(self.whole) else loss}")
        if self._place.first == 0:
            return None
        if isinstance(error, AttributeError) and type(error.obj).__name__ == "MoEModelOutput":
            return ValueError(
                f"cut: {self._words()} use {error.name!r} of what the encoder gives, of which its hidden states alone "
                "go from chunk to chunk: put the model's modules into a torch.nn.Sequential"
            )
        kind = type(error).__name__
        if not self._flow.entered:
            return ValueError(
                f"cut: the model's forward fails before {self._place.layers[0]!r}, the chunk's first layer: {kind}: "
                f"{error}. What it needs there of the batch must be a side input, "
                "pipe.step(inputs, targets, side={name: tensor}), by the name that the forward has for it; what it "
                "computes from layers of other chunks must be in a layer, or the cut elsewhere"
            )
        if not is_transformer(self.whole):
            return None
        what = f"cut: {kind} in {self._words()}: {str(error).rstrip('.')}."
        if "NoneType" in str(error) and "input_ids" not in side:
            return ValueError(f"{what} They have no token ids; if the model uses these there, {GIVE_TOKENS}")
        is_of_memory = isinstance(error, RuntimeError) and type(error) is not RuntimeError
        if self._checked or is_of_memory or not isinstance(error, IndexError | AssertionError | RuntimeError):
            return None
        return ValueError(
            f"{what} If the whole model takes this batch, it pads or changes there what the layer before gave, or "
            "computes with more than that: cut elsewhere, or make that computation a part of a layer"
        )

    def _of_another(self, error: PlaceholderUsed, side: dict[str, Any]) -> ValueError:
        """Of a forward that uses what other chunks hold."""
        beside = sorted(error.origins & self._elsewhere.keys())
        if beside:
            return ValueError(
                f"cut: {self._words()} use {beside[0]!r}, which stands beside the layers and is in the chunk of "
                f"{self._elsewhere[beside[0]]!r} alone: put it into each layer that uses it (one in several layers is "
                "a tied weight), or cut so that one chunk has all these layers"
            )
        origin = min(error.origins, key=self._layer_of)
        if origin in self._place.layers:
            return ValueError(
                f"cut: layer {origin!r} runs more than once in a forward, or more than the next layer uses what it "
                "gives; a pipeline passes each layer once: name what runs once as layers"
            )
        user = f"{self._words()} use" if error.user is None else f"layer {error.user!r} uses"
        remedy = "cut elsewhere, or make that computation a part of a layer"
        if origin in self._place.names:
            last = error.user or self._place.layers[-1]
            remedy = f"name it, cut(..., skips={{{origin!r}: {last!r}}}), with the last layer that uses it; or {remedy}"
        if is_transformer(self.whole) and "input_ids" not in side:
            remedy += f"; if that comes of token ids, {GIVE_TOKENS}"
        return ValueError(
            f"cut: {user} what is computed from that of {origin!r}, which another chunk holds, besides the output of "
            f"the layer before: {remedy}"
        )

    def _words(self) -> str:
        """What errors call this chunk."""
        return f"the layers {self._place.layers[0]!r} to {self._place.layers[-1]!r}"

    def _layer_of(self, name: str) -> int:
        """The number of the layer in which it is."""
        found = (number for number, layer in enumerate(self._place.names) if is_within(name, layer))
        return next(found, len(self._place.names))

    def _check(self, received: Any, output: Any) -> None:
        """Raises ValueError where values of other chunks came by, past torch's functions: they are NaN."""
        if any(tensor.isnan().any() for tensor in tensors_in(received)):
            return
        if any(tensor.isnan().all() for tensor in tensors_in(output) if tensor.numel()):
            raise ValueError(
                f"cut: {self._words()} give NaN only: their weights are not numbers, or the model uses something there "
                "that it computes in layers of other chunks, besides the output of the layer before: cut elsewhere, or "
                "make that computation a part of a layer"
            )


def _refusal_of(name: str) -> Any:
    """A hook before the forward of a layer, which may not get anything of another chunk but the output before it."""

    def check(module: nn.Module, inputs: Any, keywords: Any) -> None:
        if not torch.compiler.is_compiling():
            refuse_placeholders((inputs, keywords), name)
            if any(isinstance(each, Tensor) and each.is_nested for each in inputs):
                raise ValueError(
                    f"cut: layer {name!r} must get plain tensors; got a nested one: make torch.nn.TransformerEncoder "
                    "with enable_nested_tensor=False"
                )

    return check


def _refuse_positions(inputs: Sequence[Any], names: Sequence[str]) -> None:
    """Raises ValueError for more than the first argument without a name: the forwards of later chunks would do without
    it, as with the default of a mask."""
    if len(given := [name for name, value in zip(names, inputs, strict=False) if value is not None]) > 1:
        by_name = ", ".join(f"{name!r}: ..." for name in given)
        raise ValueError(
            f"cut: {given[1]!r} must come by its name, for other chunks run their forwards without it: pass "
            f"{{{by_name}}} as inputs, on every rank"
        )
