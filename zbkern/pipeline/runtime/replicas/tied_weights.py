"""Weights that several ranks hold, an embedding that is also the head, say: their gradients are summed."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.mailbox import Note
from zbkern.pipeline.transport.tensors import arrived, local_part
from zbkern.wgrad import accumulation

logger = logging.getLogger("zbkern")

SAMPLE = 64  # values of a parameter that are compared: random numbers that agree in so many are copies


class TiedWeights:
    """The weights of `tied` that have several copies, on other ranks or here.

    tied: {name: this rank's copies}; modules: this rank's chunks by number. Marks the copies (`tied_names` reads it).
    Warns of copies that differ: they get equal gradients, and would differ for ever. No error, since a checkpoint that
    makes them equal is often loaded later. Warns, too, of names that only one rank gives, and of embeddings whose
    values another parameter has and which `tied` does not name. Raises ValueError where only some copies are frozen.
    """

    def __init__(
        self, tied: Mapping[str, Sequence[Tensor]], transport: Transport, modules: Mapping[int, torch.nn.Module]
    ) -> None:
        self._transport = transport
        self._shared: list[tuple[str, Sequence[Tensor], list[int]]] = []  # with the ranks that hold it
        prints = {name: _fingerprint(copies[0]) for name, copies in tied.items()}
        trained = {name: any(copy.requires_grad for copy in copies) for name, copies in tied.items()}
        named, of_ranks, matrices = zip(*transport.gather((prints, trained, _matrices(modules, tied))), strict=True)
        if transport.rank == 0:
            for warning in (*unmatched_names(named), *untied_copies(matrices)):
                logger.warning(warning)
        holders = [
            [rank for rank, names in enumerate(named) if name in names]
            for name in sorted({name for names in named for name in names})
        ]
        transport.connect((first, rank) for first, *others in holders for rank in others)
        for name in sorted(tied):
            ranks = [rank for rank, names in enumerate(named) if name in names]
            if len(ranks) == len(tied[name]) == 1:
                continue
            for parameter in tied[name]:
                parameter.tied_name = name  # type: ignore[attr-defined]
            _check_trained(name, {rank: of_ranks[rank][name] for rank in ranks})
            copies = [named[rank][name] for rank in ranks]
            if transport.rank == ranks[0] and any(other != copies[0] for other in copies if other and copies[0]):
                logger.warning(
                    "Pipeline: the copies of tied %r differ between ranks %s (shape and sum: %s); give them one value, "
                    "from one seed, by a copy or from a checkpoint, before the first step",
                    *(name, ranks, copies),
                )
            self._shared.append((name, tied[name], ranks))

    def begin(self) -> None:
        """Leaves what earlier steps have summed, the same in all copies, with one of them: it is summed once more."""
        for _, copies, ranks in self._shared:
            for parameter in copies[1:] if ranks[0] == self._transport.rank else copies:
                if (gradient := accumulation.gradient_of(parameter)) is not None:
                    gradient.zero_()

    @torch.no_grad()
    def sum_gradients(self, step: int, timeout: float) -> None:
        """Gives every copy the sum of all copies' gradients, the same to the bit; collective among their holders."""
        transport = self._transport
        for name, copies, (first, *others) in self._shared:
            ours = [_local_gradient(parameter) for parameter in copies]
            total = local = ours[0] if len(ours) == 1 else torch.stack(ours).sum(0)
            trained = {transport.rank: all(parameter.requires_grad for parameter in copies)}
            if transport.rank == first:
                for rank in others:
                    gradient = transport.receive(rank, _tag(step, name, rank), timeout)
                    trained[rank] = gradient.requires_grad
                    total = total + gradient.detach()  # not in place: what was sent must stay
                _check_trained(name, trained)  # some may have been frozen since the constructor
                for rank in others:
                    transport.send(rank, _tag(step, name, first), total)
            else:
                sent = local.detach().requires_grad_(trained[transport.rank])  # whether the parameter does
                transport.send(first, _tag(step, name, transport.rank), sent)
                total = transport.receive(first, _tag(step, name, first), timeout)
            for local in ours:
                local.copy_(total)


def _tag(step: int, name: str, rank: int) -> Note:
    """The tag of a rank's gradient of a tied weight; of the first holder's, when it sends the sum back."""
    return Note(step, f"the gradient of tied {name!r} from rank {rank}")


def all_ties(modules: Iterable[torch.nn.Module], more: Mapping[str, Tensor] | None) -> dict[str, list[Tensor]]:
    """{name: this rank's copies} of `more` and what these modules, or what data parallelism wraps, declare to be tied.

    fully_shard makes a parameter of its own for every chunk that has one: they are copies from then on.
    """
    copies_of: dict[str, list[Tensor]] = {name: [parameter] for name, parameter in (more or {}).items()}
    for module in modules:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        for name, parameter in getattr(module, "tied_parameters", {}).items():
            copies = copies_of.setdefault(name, [])
            if not any(parameter is copy for copy in copies):
                copies.append(parameter)
    return copies_of


def _check_trained(name: str, trained: dict[int, bool]) -> None:
    if len({*trained.values()}) > 1:
        frozen = [rank for rank, yes in trained.items() if not yes]
        raise ValueError(
            f"Pipeline: tied {name!r} must be trained on all ranks that hold it, or frozen on all; it is frozen on "
            f"{frozen} of {[*trained]}, and the copies would differ: requires_grad_(False) on each of them, such as "
            "chunk.tied_parameters[name] of chunks that `cut` made"
        )


def _local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, zeros where there is none."""
    gradient = accumulation.gradient_of(parameter)
    if gradient is None:
        gradient = accumulation.empty_gradient(parameter).zero_()
        if parameter.requires_grad:  # a frozen one only takes part: an optimizer decays what has a gradient
            parameter.grad = gradient
    return arrived(local_part(gradient))


def _fingerprint(parameter: Tensor) -> tuple[list[int], float] | None:
    """Shape and sum of all values, the same for the same values; None for a parameter without memory."""
    if parameter.is_meta:
        return None
    return list(parameter.shape), local_part(parameter).detach().sum(dtype=torch.float64).item()


class TrainedMatrix(NamedTuple):
    """A trained parameter of two dimensions: chunk and name, what `tied` calls it, a digest, whether an embedding's."""

    chunk: int
    name: str
    tied: str | None
    digest: bytes
    embedding: bool


def _matrices(modules: Mapping[int, torch.nn.Module], tied: Mapping[str, Sequence[Tensor]]) -> list[TrainedMatrix]:
    """The trained matrices of these modules, each parameter once; none that has no memory, or one value everywhere."""
    names = {id(parameter): name for name, copies in tied.items() for parameter in copies}
    matrices: dict[int, TrainedMatrix] = {}
    for chunk, module in modules.items():
        tables = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
        for name, parameter in module.named_parameters():
            if id(parameter) in matrices or not parameter.requires_grad or is_lazy(parameter) or parameter.dim() != 2:
                continue
            key = id(parameter)
            if (digest := digest_of(parameter)) is not None:
                matrices[key] = TrainedMatrix(chunk, name, names.get(key), digest, key in tables)
    return [*matrices.values()]


def unmatched_names(named: Sequence[Mapping[str, object]]) -> list[str]:
    """A warning of names in `tied` that one rank alone gives, where several ranks give such names.

    named: the names by rank. One rank with such a name is in order: it holds both modules, as in a V.
    """
    times = Counter(name for names in named for name in names)
    alone = {rank: sorted(name for name in names if times[name] == 1) for rank, names in enumerate(named)}
    alone = {rank: names for rank, names in alone.items() if names}
    if len(alone) < 2:
        return []
    return [
        f"Pipeline: tied must have one name on all ranks that hold the weight; got names that one rank alone gives, "
        f"whose gradients are not summed: {alone} (by rank)"
    ]


def untied_copies(matrices: Sequence[Sequence[TrainedMatrix]]) -> list[str]:
    """Warnings of weights that look tied and are not: embeddings whose values another parameter has, too.

    matrices: by rank. Embeddings only: ranks that start from one seed have more that is equal by chance.
    """
    equal: dict[bytes, list[tuple[int, TrainedMatrix]]] = {}
    for rank, ours in enumerate(matrices):
        for matrix in ours:
            equal.setdefault(matrix.digest, []).append((rank, matrix))
    warnings = []
    for holders in equal.values():
        declared = {matrix.tied for _, matrix in holders}
        together = len(declared) == 1 and None not in declared
        if len(holders) == 1 or together or not any(matrix.embedding for _, matrix in holders):
            continue
        label = next((matrix.tied for _, matrix in holders if matrix.tied), holders[0][1].name)
        places = " and ".join(f"{matrix.name!r} of chunk {matrix.chunk} on rank {rank}" for rank, matrix in holders)
        by_rank = dict(reversed([(rank, matrix) for rank, matrix in holders]))
        remedies = [
            f"tied={{{label!r}: chunk.get_parameter({matrix.name!r})}} on rank {rank}"
            for rank, matrix in sorted(by_rank.items())
        ]
        if len(by_rank) == 1:
            remedies = ["one Parameter for both modules"]
        elif len(by_rank) < len(holders):
            remedies.append("one Parameter for the modules of one rank")
        warnings.append(
            f"Pipeline: {places} hold the same values, and each is trained by its own gradient alone. If they are one "
            f"weight of the model, say so with {', '.join(remedies)}; if not, start them from different seeds"
        )
    return warnings


def digest_of(parameter: Tensor) -> bytes | None:
    """Equal for equal values, from some of them; None where there are none, or they do not differ."""
    local = local_part(parameter)
    if local.is_meta or not local.numel():
        return None
    values = local.detach().resolve_conj().flatten()[:: max(1, local.numel() // SAMPLE)][:SAMPLE].cpu().contiguous()
    raw = bytes(values.view(torch.uint8).tolist())
    if raw == raw[: values.element_size()] * len(values):
        return None
    return hashlib.blake2b(raw + repr((parameter.shape, parameter.dtype)).encode(), digest_size=16).digest()
