"""Checkpoints by the names of the whole model, which torch.distributed.checkpoint's tools read, too.

No key says which stage wrote it, so a checkpoint loads with any number of stages, under any schedule, in one process.
`save` writes into a folder of its own and renames it when everything in it is on the disk: whatever interrupts it, the
checkpoints before are whole, and what is called a checkpoint is complete. `load` verifies a checksum of all that it
reads, and nothing in a checkpoint can run code. What fails on one rank is an error on all.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbkern.pipeline.checkpoint import dcp_format, directory
from zbkern.pipeline.checkpoint.dcp_format import Index
from zbkern.pipeline.checkpoint.named_state import (
    Modules,
    NamedState,
    Rename,
    check_unique,
    is_of_model,
    names_of_model,
)
from zbkern.pipeline.checkpoint.packed import digest, pack, unpack
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.runtime.forward_state import random_state, set_random_state
from zbkern.pipeline.transport.rank_exchange import TIMEOUT, RankExchange
from zbkern.schedules.actions import check_count
from zbkern.schedules.units import some

logger = logging.getLogger("zbkern")


class Loaded(NamedTuple):
    """What `load` found: the step of the checkpoint, and the `extra` that was saved with it.

    None where ranks saved one each, and this rank holds other parts of the model than that of its number did.
    """

    step: int
    extra: Any


def save(
    folder: str | os.PathLike,
    step: int,
    modules: Modules,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    rename: Rename | None = None,
    keep: int = 1,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Path:
    """Writes `folder`/step-00000042 and returns its path on every rank once it is complete and on the disk; collective.

    Args:
        folder: on a file system that all ranks share.
        modules: a Pipeline; or {chunk number in model order: module} of this rank; or one module, the whole model.
        optimizer: an Optimizer or a torch optimizer of their parameters; the last step of a Pipeline's own is validated
            first, given or not.
        extra: what else a run needs to go on, such as the data position: numbers, strings, tensors, and lists and dicts
            of them. What is the same on all ranks loads on any; else each rank's own is saved, and goes to the rank of
            that number if it holds the same parts of the model, such as a schedule's of layer-wise learning rates.
        rename: rename(chunk, key) is the name in the whole model of what the chunk's module calls `key`; needed where
            every chunk numbers its layers from zero.
        keep: how many checkpoints stay, the newest.
        group: the ranks that take part, None for all of the world, also where the Pipeline runs on some of them;
            without torch.distributed this process alone.
        timeout: seconds that ranks wait for each other before and after they write; None for the Pipeline's, or 1800.

    States of random number generators (torch's, Python's) are saved by rank.
    Raises ValueError when two tensors get one name, when a parameter of the optimizer is in no module, or when ranks
    have different steps or folders, TypeError for an `extra` that could not be read again, and OSError: on the rank
    that finds it, PipelineError with the rank and the error on the others, and on all when a rank does not come. The
    older checkpoints are then as they were, and ranks can save again. What cannot be deleted is a warning.
    """
    with _exchange("checkpoint.save", group, timeout, modules) as ranks:
        folder = Path(folder)
        check_count("checkpoint: step", step, 0)
        check_count("checkpoint: keep", keep)
        state = NamedState(modules, optimizer, rename, ranks.rank, ranks.size)
        ranks.exchange("arguments checked", (step, state.names()), _check_agreement)
        for boundary in state.boundaries():
            boundary.validate()  # before a weight is read
        tensors = state.tensors()
        tensors[f"random.{state.rank}"] = pack(random_state(state.device), "the random state")
        pack(extra, "extra")  # checked on every rank
        is_own = ranks.exchange("extra compared", digest(extra), lambda all: [len({*all}) > 1] * ranks.size)
        if is_own:
            tensors[f"extra.{state.rank}"] = pack([state.holds(), extra], "extra")
        if state.rank == 0:
            tensors["common"] = pack({"step": step} if is_own else {"step": step, "extra": extra}, "the state")

        def begin(ranks: list[Any]) -> list[tuple[str, list[str]]]:
            keys_by_rank = dcp_format.share_out(ranks)  # raises before a folder is made
            name = directory.begin(folder, step).name
            return [(name, keys) for keys in keys_by_rank]

        parts = {key: ([*tensor.shape], *dcp_format.part_of(tensor)) for key, tensor in tensors.items()}
        name, mine = ranks.exchange("tensors listed", parts, begin)
        scratch = folder / name
        _check_shared(scratch)
        pieces = dcp_format.write_tensors(scratch, state.rank, {key: tensors[key] for key in mine})

        def commit(pieces: list[Any]) -> None:
            dcp_format.finish(scratch, pieces)
            directory.commit(scratch, step, keep)

        ranks.exchange("tensors written", pieces, commit)
        return folder / directory.name_of(step)


def load(
    folder: str | os.PathLike,
    modules: Modules,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    rename: Rename | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Loaded | None:
    """Loads the newest checkpoint, or that of `step`, into modules and optimizer; None where there is none; collective.

    Arguments as for `save`; stages, schedule and placement may differ from those that saved. A step of the Pipeline's
    own Optimizer that awaits its validation is given up; where that one is not loaded, its masters, or those that its
    torch optimizer keeps, take the weights.
    Random number generators go on where those of the same rank stopped; a rank that did not exist keeps its own.
    Raises ValueError when there is no checkpoint of `step`, when it does not hold this model or the state of this kind
    of optimizer, when a checksum does not fit, or when it was written without checksums; on other ranks as `save`.
    Nothing has been changed then on any rank: the model's tensors are read twice, and verified on all ranks before one
    is changed. What fails only in the second reading leaves model and optimizer partly loaded, and a warning says so.
    Warns where it holds more than the model, and where it holds different tensors for what is one parameter here.
    """
    with _exchange("checkpoint.load", group, timeout, modules) as ranks:
        folder = Path(folder)
        if step is not None:
            check_count("checkpoint: step", step, 0)
        state = NamedState(modules, optimizer, rename, ranks.rank, ranks.size)
        chosen = _chosen(ranks, state, folder, step)
        if chosen is None:
            return None
        path, index = chosen
        stored = index.tensors
        wanted = state.targets(stored)
        own = [f"{kind}.{state.rank}" for kind in ("random", "extra")]
        wanted.update({key: stored[key].empty() for key in ("common", *own) if key in stored})
        of_model = {key: tensor for key, tensor in wanted.items() if is_of_model(key)}
        dcp_format.read(path, index, {key: tensor for key, tensor in wanted.items() if key not in of_model})
        dcp_format.read(path, index, of_model, verify=True)  # read when all ranks have come this far
        common = unpack(wanted.pop("common"))
        stored_random, own_extra = (unpack(wanted.pop(key)) if key in wanted else None for key in own)
        saved_by = sum(key.startswith("random.") for key in stored)
        state.check(wanted, saved_by)
        holds, extra = own_extra or (None, common.get("extra"))
        if "extra" not in common and (saved_by, holds) != (ranks.size, state.holds()):
            extra = None
            logger.warning(
                "%s: extra is None, as each of %d ranks saved its own, and rank %d of %d holds other parts of it",
                *(path, saved_by, state.rank, ranks.size),
            )
        ranks.exchange("checkpoint verified")
        for boundary in state.boundaries():
            boundary.forget()
        if isinstance(modules, Pipeline):  # from here its ranks are at the same step again
            modules._calls.completed = 0
        try:
            dcp_format.read(path, index, of_model)
            state.take(wanted)
        except BaseException:
            logger.warning(
                "checkpoint.load: rank %d: loading %s failed after it was verified; model and optimizer are partly "
                "loaded: load again before they are used",
                *(state.rank, path),
            )
            raise
        if stored_random is not None:
            set_random_state(stored_random, state.device)
        else:
            logger.info("rank %d: %s has no random state for this rank, which keeps its own", state.rank, path)
        ranks.exchange("tensors read")
        return Loaded(common["step"], extra)


def latest(folder: str | os.PathLike) -> Path | None:
    """The newest checkpoint of a folder, None where there is none."""
    return directory.find(Path(folder), None)


# ---- arguments, and what ranks must agree on

_ONE_PLACE = "folder must be one place shared by all ranks"


def _exchange(call: str, group: dist.ProcessGroup | None, timeout: float | None, modules: Modules) -> RankExchange:
    if not isinstance(modules, Pipeline):
        return RankExchange(call, group, TIMEOUT if timeout is None else timeout)
    return RankExchange(
        call, group, modules._calls.timeout if timeout is None else timeout, transport=modules._calls.transport
    )


def _chosen(ranks: RankExchange, state: NamedState, folder: Path, step: int | None) -> tuple[Path, Index] | None:
    """The checkpoint that rank 0 has found, and its index, the same on all ranks; None where there is none."""
    everywhere: set[str] = set()  # on rank 0

    def choose(values: list[Any]) -> list[tuple[str, int]] | None:
        _check_agreement([(step, names) for step, names, _ in values])
        names = [entry for _, of_rank, _ in values for entry in of_rank]
        everywhere.update(name for name, _, _ in names)
        path = directory.find(folder, step)
        if path is None:
            _check_absent(folder, step, [seen for *_, seen in values])
            return None
        index = dcp_format.read_index(path)
        _warn_of_differing_copies(path, index, names)
        return [(path.name, index.checksum)] * ranks.size

    seen = directory.find(folder, step)
    here = (step, state.names(), None if seen is None else seen.name)
    chosen = ranks.exchange("arguments checked", here, choose)
    if chosen is None:
        return None
    path, checksum = folder / chosen[0], chosen[1]
    _check_shared(path)
    index = dcp_format.read_index(path)
    if index.checksum != checksum:
        raise ValueError(f"checkpoint.load: {path} is another one on rank 0; {_ONE_PLACE}")
    without = [name for name in names_of_model(index.tensors) if name not in everywhere]
    if state.rank == 0 and without:
        logger.warning("%s holds %d tensors that no rank's model has: %s", path, len(without), some(without))
    return path, index


def _check_agreement(values: list[tuple[int | None, list[tuple[str, int, str]]]]) -> None:
    """Raises ValueError where ranks have different steps, or chunks one name; by rank (step, `NamedState.names`)."""
    for rank, (step, _) in enumerate(values):
        if step != values[0][0]:
            raise ValueError(
                f"checkpoint: step must be the same on all ranks; rank 0 has {values[0][0]}, rank {rank} {step}"
            )
    check_unique(entry for _, names in values for entry in names)


def _check_absent(folder: Path, step: int | None, seen: list[str | None]) -> None:
    """Raises ValueError where another rank has what rank 0 has not, or that has to be there. seen: names, by rank."""
    for rank, name in enumerate(seen):
        if name is not None:
            raise ValueError(f"checkpoint.load: rank {rank} sees {folder / name}, and rank 0 does not; {_ONE_PLACE}")
    for path in directory.lost(folder, step):
        raise ValueError(
            f"checkpoint.load: {path} is no checkpoint, as it has neither {dcp_format.INDEX} nor .metadata; its files "
            "were lost or moved: bring them back, or remove the folder to start without it"
        )
    if step is not None:
        steps = ", ".join(map(str, directory.complete(folder))) or "none"
        raise ValueError(f"checkpoint.load: {folder} has no checkpoint of step {step}; there are {steps}")


def _warn_of_differing_copies(path: Path, index: Index, names: list[tuple[str, int, str]]) -> None:
    """Warns where there are different tensors for one parameter. names: `NamedState.names` of all ranks."""
    first_of: dict[str, str] = {}
    for name, _, label in names:
        first = first_of.setdefault(label, name)
        copies = [index.tensors.get(f"model.{key}") for key in (first, name)]
        if label and copies[0] and copies[1] and not copies[0].same_as(copies[1]):
            logger.warning(
                "%s: %r differs from %r, and this model has one tied parameter for both; a rank that holds both "
                "takes the first, others their own: load it into a model that does not tie them",
                *(path, name, first),
            )


def _check_shared(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"checkpoint: rank 0 sees {path}, and this rank does not; {_ONE_PLACE}")
