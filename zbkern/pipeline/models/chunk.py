"""A chunk of a model: the model's own forward, in which layers of other chunks compute nothing.

Whatever a forward does besides its layers (positions, masks, rotary embeddings) it does in every chunk. The layer
before the chunk's first gives what was received, the layer after its last ends the forward, and those before give
placeholders, so that a model that uses more of them than the last one's output cannot go wrong in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from zbkern.pipeline.models.adapters import check_ties, plain_names
from zbkern.pipeline.models.arguments import refuse_unknown, split_batch, without_images
from zbkern.pipeline.models.deferred_logits import deferred, in_place_of_head
from zbkern.pipeline.models.families import known_arguments, pools_by_padding
from zbkern.pipeline.models.halves import CallCheck, Halves
from zbkern.pipeline.models.layers import encoder_of, is_transformer, is_within, name_in
from zbkern.pipeline.models.placeholders import PlaceholderUsed, placeholder, refuse_placeholders
from zbkern.pipeline.models.router_losses import RouterLosses, has_router_loss
from zbkern.pipeline.models.stand_ins import GIVE_TOKENS, ArgumentElsewhere, Flow, Reached, refuse_resizing, result_of
from zbkern.pipeline.models.whole_lengths import WholeLengths
from zbkern.pipeline.transport.tensors import tensors_in


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
        self.layer_names = names[int(first) : ceil(last)]
        self.all_layers, self.begins_at, self._last, self.shared_names = names, first, last, dict(shared)
        self._flow, self._elsewhere, self._tied_elsewhere = flow, elsewhere, tied_elsewhere
        # DistributedDataParallel would broadcast into placeholders, which have no memory of their own
        self._ddp_params_and_buffers_to_ignore = list(elsewhere)
        self.tensor_names = plain_names(self)  # what is wrapped later has others
        self._checked = self._defers = False
        self._needs_masks: bool | None = None  # of packs
        self._known_arguments = known_arguments(whole)  # before layers are converted
        flow.first, flow.last = self.layer_names[0], self.layer_names[-1]
        if first % 1:
            block = whole.get_submodule(flow.first)
            flow.kind, flow.argument = type(block), next(iter(inspect.signature(block.forward).parameters))
            self._entering = block.register_forward_pre_hook(flow.enter_inside, with_kwargs=True)
        self._call_checks = {name: CallCheck(name, each) for name, each in halves.items()}
        for name, check in self._call_checks.items():
            whole.get_submodule(name).register_forward_pre_hook(check, with_kwargs=True)
        for name in self.layer_names:
            whole.get_submodule(name).register_forward_pre_hook(_refusal_of(name), with_kwargs=True)
        encoder = encoder_of(whole)
        self._encoder_layers = sum(name.startswith(f"{encoder}.") for name in names) if encoder else 0
        self._skips = [name for name in skips if name != names[int(last) - 1] or last % 1]  # that one is sent anyway
        before = names[int(first) - 1] if first and not first % 1 else ""
        self._entry = before if before in self._skips else ""
        mine = (name for name in self._skips if name in self.layer_names)
        self._last_hooks: dict[str, Any] = {name: partial(flow.skip, name) for name in mine}
        if last < len(names):
            # of an encoder's last layer with what the encoder does after it
            self._last_hooks[encoder if last == self._encoder_layers else flow.last] = flow.leave
        self._handles = {
            name: whole.get_submodule(name).register_forward_hook(h) for name, h in self._last_hooks.items()
        }
        if first < self._encoder_layers < last:
            whole.get_submodule(encoder).register_forward_hook(flow.encode)
        routes = is_transformer(whole) and has_router_loss(whole)
        if is_transformer(whole) and (first > 0 or last < len(names)):
            whole.__dict__["resize_token_embeddings"] = refuse_resizing
        self._lengths = WholeLengths(whole, self.layer_names) if is_transformer(whole) else None
        self._routers = RouterLosses(whole, [*self.layer_names], flow) if routes else None
        self._head = names[-1]
        if last == len(names) and is_transformer(whole):
            self._head = name_in(whole, self.whole.get_output_embeddings())

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
        return split_batch(self.whole, self._encoder_layers > 0, batch)

    def check_sliceable(self) -> None:
        """Raises TypeError or ValueError where sequences cannot come in slices, as in a schedule that has them."""
        if is_transformer(self.whole):
            if pools_by_padding(self.whole):
                raise ValueError(
                    f"cut: {type(self.whole).__name__} looks for the last token of whole sequences: use a schedule "
                    "without slices"
                )
            sliced_cache().check_sliceable(self.whole)
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
        for name, check in self._call_checks.items():
            block: Any = self.get_submodule(name)
            block._compiled_call_impl = partial(check.around, block, block._compiled_call_impl)
        if self.begins_at % 1:
            first: Any = self.get_submodule(self.layer_names[0])
            first._compiled_call_impl = partial(self._flow.call_inside, first, first._compiled_call_impl)

    @contextmanager
    def deferred_logits(self) -> Iterator[None]:
        """Inside, the last chunk may give `DeferredLogits` in the place of logits: for a loss that takes them."""
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def train(self, mode: bool = True) -> Chunk:
        self.whole.training = mode
        return super().train(mode)

    def forward(
        self,
        *inputs: Any,
        passed: Any = None,
        encoded: Any = None,
        routed: Any = None,
        skipped: Mapping[str, Any] | None = None,
        **side: Any,
    ) -> Any:
        if torch.compiler.is_compiling():
            _refuse_to_compile()
        received = passed if passed is not None else inputs[0] if inputs else None
        encoded = received if self.begins_at == self._encoder_layers > 0 else encoded
        if self._routers is not None:
            self._routers.begin()
        if self._entry:
            skipped = {**(skipped or {}), self._entry: received}
        output, encoded, skipped = self._own_output(received, encoded, skipped, inputs, side)
        if self._routers is not None:
            routed = self._routers.sums(routed, side.get("attention_mask"))
        if not self._checked:
            self._check(received, output)
            self._checked = True
        if self._last == len(self.all_layers):
            return output if self._routers is None else self._routers.add(output, routed, side.get("carry"))
        given = {"passed": output, "encoded": encoded, "routed": routed, "skipped": skipped or None}
        given = {name: value for name, value in given.items() if value is not None}
        return output if isinstance(output, Tensor) and len(given) == 1 else given

    def _own_output(
        self, received: Any, encoded: Any, skipped: Mapping[str, Any] | None, inputs: Any, side: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """What the last of the layers gives; what the encoder gave, where layers of a decoder follow; and skips."""
        self._flow.begin(None if self.begins_at == 0 else received, encoded, skipped)
        self._put_hooks_last()
        if self.begins_at % 1:  # before the hooks of `fully_shard`, which are for what is received
            hooks = self.whole.get_submodule(self._flow.first)._forward_pre_hooks
            if self._entering.id in hooks:
                hooks.move_to_end(self._entering.id, last=False)
        self._flow.runs = True
        defers = self._defers and self._head in self.layer_names
        try:
            with in_place_of_head(self, self._head) if defers else nullcontext():
                output = self._run(inputs, side)
        except Reached:
            output = None
        except Exception as error:
            if (explained := self._explained(error, side)) is not None:
                raise explained from error
            raise
        finally:
            if self._lengths is not None:
                self._lengths.end()
            sent, left, entered = self._flow.sent, self._flow.left, self._flow.entered
            encoded, ended, skips = self._flow.encoded, self._flow.ended, self._flow.skips
            self._flow.runs = False
            self._flow.begin(None)
        if self._last < len(self.all_layers):
            if not left:
                before, after = self.layer_names[-1], ended or self.all_layers[int(self._last)]
                raise ValueError(
                    f"cut: layer {before!r} must run before {after!r}; it did not: name the layers in the order in "
                    "which they run, each called once in every forward"
                )
            output = sent
        elif self.begins_at > 0 and not entered:
            raise ValueError(
                f"cut: layer {self.all_layers[ceil(self.begins_at) - 1]!r} must be called in every forward; it was "
                "not: name modules that the forward calls"
            )
        else:
            output = deferred(result_of(output))
        skipped = skips.of(self._skips)
        try:
            refuse_placeholders((output, skipped))
        except PlaceholderUsed as error:
            raise self._of_another(error, side) from error
        return output, encoded, skipped

    def _put_hooks_last(self) -> None:
        """Moves the hooks of what is sent behind all others: those of `fully_shard`, say, are for what is sent.

        A layer may have been wrapped since, and the wrapper gets the hook.
        """
        for name, hook in self._last_hooks.items():
            layer = self.whole.get_submodule(name)
            if self._handles[name].id not in layer._forward_hooks:
                self._handles[name].remove()
                self._handles[name] = layer.register_forward_hook(hook)
            layer._forward_hooks.move_to_end(self._handles[name].id)

    def _run(self, inputs: Any, side: dict[str, Any]) -> Any:
        transformer = is_transformer(self.whole)
        if self._lengths is not None:
            carry = side.get("carry")
            side = {name: value for name, value in side.items() if name != "carry"}
            refuse_unknown(self.whole, self._known_arguments, side)
            self._lengths.begin(side, carry)
            side = {"use_cache": False, **side} | ({"output_router_logits": False} if self._routers else {})
            if carry is not None:
                layers = map(self.get_submodule, self.layer_names)
                if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
                    self.check_sliceable()  # it was switched on since, and layers would read no earlier slice
                side = sliced_cache().arguments_of_slice(self.whole, side, carry)
            elif side.get("position_ids") is not None:
                if self._needs_masks is None:
                    self._needs_masks = sliced_cache().needs_masks_of_packs(self.whole)
                side = sliced_cache().masks_of_pack(self.whole, side) if self._needs_masks else side
        names = [*inspect.signature(self.whole.forward).parameters]
        own = names[0] if names else None
        if transformer and (self.begins_at > 0 or self._last < len(self.all_layers)):
            side = without_images(self.whole, own, side, self.all_layers, self.begins_at, self._last)
        if self.begins_at >= self._encoder_layers > 0:
            side["encoder_outputs"] = self._encoder_outputs()
            return self.whole(**side)
        if own in side:  # on every rank, and so in the place of what the first has
            return self.whole(**side)
        if self.begins_at == 0:
            return self.whole(*inputs, **side)
        if not transformer or "input_ids" in side or "inputs_embeds" not in names:
            return self.whole(ArgumentElsewhere(own), **side)
        if self._last == len(self.all_layers) and pools_by_padding(self.whole):
            raise ValueError(
                f"cut: {type(self.whole).__name__} pools by its padding, which token ids show, and would take the last "
                f"token of each row without them: {GIVE_TOKENS}"
            )
        if self.begins_at == 1:  # the embedding is all that other chunks have done
            return self.whole(inputs_embeds=self._flow.enter(self.all_layers[0]), **side)
        return self.whole(inputs_embeds=self._no_embeddings(), **side)

    def _encoder_outputs(self) -> Any:
        """What the encoder gave, for a chunk that has none of its layers and does not run its forward."""
        from transformers.modeling_outputs import MoEModelOutput

        if self.begins_at == self._encoder_layers:
            self._flow.enter(self.all_layers[int(self.begins_at) - 1])
        return MoEModelOutput(last_hidden_state=self._flow.encoded)  # Switch Transformers read its router_logits

    def _no_embeddings(self) -> Tensor:
        """A placeholder in the shape of embeddings. What blocks pass on may have one dimension more."""
        given = self._flow.tensor_like_received(self.all_layers[0])
        if given.dim() <= 3:
            return given
        hidden_size = self.whole.config.get_text_config().hidden_size
        like = torch.empty((), dtype=given.dtype, device=given.device).expand(*given.shape[:2], hidden_size)
        return placeholder(like, self.all_layers[0])

    def _explained(self, error: Exception, side: dict[str, Any]) -> ValueError | None:
        """The error to raise in place of one that layers elsewhere cause; None for one that explains itself."""
        if isinstance(error, PlaceholderUsed):
            return self._of_another(error, side)
        if str(error).startswith("cut: "):
            return ValueError(str(error)) if isinstance(error, AttributeError) else None  # of a stand-in
        if self.begins_at == 0:
            return None
        if isinstance(error, AttributeError) and type(error.obj).__name__ == "MoEModelOutput":
            return ValueError(
                f"cut: {self._words()} use {error.name!r} of what the encoder gives, of which its hidden states alone "
                "go from chunk to chunk: put the model's modules into a torch.nn.Sequential"
            )
        kind = type(error).__name__
        if not self._flow.entered:
            return ValueError(
                f"cut: the model's forward fails before {self.layer_names[0]!r}, the chunk's first layer: {kind}: "
                f"{error}. What it needs there of the batch must be a side input, "
                "pipe.step(inputs, targets, side={name: tensor}), by the name that the forward has for it; what it "
                "computes from layers of other chunks must be in a layer, or the cut elsewhere"
            )
        if not is_transformer(self.whole):
            return None
        what = f"cut: {kind} in {self._words()}: {str(error).rstrip('.')}."
        if "NoneType" in str(error) and "input_ids" not in side:
            return ValueError(f"{what} They have no token ids; if the model uses these there, {GIVE_TOKENS}")
        is_of_shapes = (
            isinstance(error, IndexError | AssertionError) or type(error) is RuntimeError
        )  # and not of memory
        if self._checked or not is_of_shapes:
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
        if origin in self.layer_names:
            return ValueError(
                f"cut: layer {origin!r} runs more than once in a forward, or more than the next layer uses what it "
                "gives; a pipeline passes each layer once: name what runs once as layers"
            )
        user = f"{self._words()} use" if error.user is None else f"layer {error.user!r} uses"
        remedy = "cut elsewhere, or make that computation a part of a layer"
        if origin in self.all_layers:
            last = error.user or self.layer_names[-1]
            remedy = f"name it, cut(..., skips={{{origin!r}: {last!r}}}), with the last layer that uses it; or {remedy}"
        if is_transformer(self.whole) and "input_ids" not in side:
            remedy += f"; if that comes of token ids, {GIVE_TOKENS}"
        return ValueError(
            f"cut: {user} what is computed from that of {origin!r}, which another chunk holds, besides the output of "
            f"the layer before: {remedy}"
        )

    def _words(self) -> str:
        """What errors call this chunk."""
        return f"the layers {self.layer_names[0]!r} to {self.layer_names[-1]!r}"

    def _layer_of(self, name: str) -> int:
        """The number of the layer in which it is."""
        found = (number for number, layer in enumerate(self.all_layers) if is_within(name, layer))
        return next(found, len(self.all_layers))

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


@torch.compiler.disable(reason="a chunk of cut compiles its layers one by one, by chunk.compile()")
def _refuse_to_compile() -> None:
    """Not compiled itself: an error that dynamo meets while it traces is reported as its own."""
    raise TypeError(
        "cut: a chunk compiles its layers one by one, and not as a part of torch.compile(...): call compile() of the "
        "chunk that `cut` made"
    )


def sliced_cache() -> Any:
    """The module that needs the transformers library."""
    from zbkern.pipeline.models import sliced_cache

    return sliced_cache


def _refusal_of(name: str) -> Any:
    """A hook before the forward of a layer, which may not get anything of another chunk but the output before it."""

    def check(module: nn.Module, inputs: Any, keywords: Any) -> None:
        if not torch.compiler.is_compiling():
            refuse_placeholders((inputs, keywords), name)

    return check
