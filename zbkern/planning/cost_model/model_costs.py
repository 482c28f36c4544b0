"""Costs of a model on a GPU, from flops and bytes alone: for planning before there is a machine to measure on.

A model, and no measurement. A matrix product takes as long as its flops or its bytes, whichever is longer, at the
shares of the peaks that `Hardware` names, a small one longer; attention, at shares of its own, computes what its mask
leaves; other operations take their bytes; every layer and every pass takes some time of its own. docs/cost_model.md
says what is assumed besides. Of a sequence in slices keys and values of all heads stay, also where their layer has a
window or makes them from small vectors, as caches of the transformers library have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from zbkern.planning.cost_model.architecture import Architecture, Block
from zbkern.planning.cost_model.expert_traffic import reached
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.layer_kinds import Core, Experts, Part, Product
from zbkern.planning.cost_model.places import in_a_node
from zbkern.planning.costs.chunks import COPY_SIZE, checked_number
from zbkern.planning.costs.layers import LayerCosts, ModelCosts
from zbkern.schedules.actions import check_count
from zbkern.schedules.layout import HALVES

WIDTH = 2  # bytes of a bf16 number
WIDE = 4  # of an fp32 number: statistics, gradients
MS = 1e3
_SOME = 1 / 8  # of a sequence: from what so many rows take follows what does not shrink with them
_REDUCED = 2  # of a gradient that travels between pipelines
_QUANTISED = 3  # bytes read and written for a number that becomes FP8
_STEP = 30  # bytes that AdamW reads and writes per parameter: gradient, both moments, fp32 weight, and the bf16 one
_LOGITS = 1024  # rows whose logits a head has at a time: `CrossEntropyOptions.chunk`


@dataclass(frozen=True)
class Job:
    """How a model is trained: parallelism beside the pipeline's, and the size of a microbatch.

    tensor_parallel: GPUs that share every layer. expert_parallel: GPUs among which the experts are, whole; with 1 every
    expert is split as other layers are. context_parallel: GPUs that share the tokens of every sequence, and send keys
    and values around. data_parallel: pipelines beside each other, which share the optimizer's state with those; 0 for
    as few as have room for the experts. fully_shard: they share weights and gradients, too (FSDP2, ZeRO-3), gathered
    for every F and B and reduced after every W: of pipelines of one stage. fp8: products of F and B are in FP8, W in
    bf16 (`recipe="fp8_blockwise"`). halves: chunks may begin inside blocks. overlap: passes may run beside each other
    while the all-to-alls of experts are in flight (`Schedule.beside`).
    sequence: tokens of a sequence; microbatch_size: sequences of a microbatch. weight_bytes, optimizer_bytes: of every
    parameter, its weight with its gradient, and what of it the pipelines share: 6 and 12 for bf16 weights with fp32
    gradients, two moments and an fp32 master; 8 and 8 for AdamW in fp32, 6 and 6 with moments of 8 bits, 12 more for an
    optimizer that can be undone by a snapshot. Raises TypeError or ValueError.
    """

    sequence: int = 4096
    microbatch_size: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    data_parallel: int = 0
    context_parallel: int = 1
    fp8: bool = False
    fully_shard: bool = False
    halves: bool = False
    overlap: bool = False
    weight_bytes: float = 6.0
    optimizer_bytes: float = 12.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("_bytes"):
                checked_number("Job", name, value)
            elif name not in ("fp8", "fully_shard", "halves", "overlap"):
                check_count(f"Job: {name}", value, int(name != "data_parallel"))
        if self.tensor_parallel * self.replicas % self.expert_parallel:
            raise ValueError(
                f"Job: tensor_parallel * data_parallel must be a multiple of expert_parallel, whose GPUs they are; got "
                f"{self.tensor_parallel} * {self.replicas} and {self.expert_parallel}"
            )
        if self.sequence % self.context_parallel:
            raise ValueError(
                f"Job: context_parallel must divide the sequence of {self.sequence} tokens; got {self.context_parallel}"
            )

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.sequence * self.microbatch_size

    @property
    def rows(self) -> float:
        """Of a microbatch, those of the GPUs that share a layer."""
        return self.tokens / self.context_parallel

    @property
    def pipelines(self) -> int:
        """Beside each other."""
        shared = self.tensor_parallel * self.context_parallel
        return self.data_parallel or self.expert_parallel // gcd(self.expert_parallel, shared)

    @property
    def replicas(self) -> int:
        """GPUs that have the same weights, and share their optimizer's state."""
        return self.pipelines * self.context_parallel

    def gpus(self, stages: int) -> int:
        """Of all pipelines."""
        return stages * self.tensor_parallel * self.replicas


class Setting(NamedTuple):
    """What costs are computed from: a model, a GPU, and how the model is trained."""

    architecture: Architecture
    hardware: Hardware
    job: Job

    @property
    def costs(self) -> ModelCosts:
        """Of every layer for one GPU, in ms and bytes: embedding, blocks, norm with head and loss, then predictors.

        Their names are those that `cut` counts; norm and head are one, named as the norm, and predictors, which the
        transformers library does not build, are named as in DeepSeek's checkpoints. With job.halves blocks whose MLP
        follows their attention are two layers, as `layers_of(model, halves=True)` lists them; a chunk adds zeros in the
        place of the half that another one has, which takes time that is not counted.

        See the module for what is assumed. Raises ValueError where heads, experts or features cannot be divided so.
        """
        gpu, share = self.hardware, self.hardware.network_share
        copies = None if gpu.host_bandwidth is None else gpu.host_bandwidth * share / MS
        computed = ModelCosts(
            tuple([layer.costs() for layer in _layers(self)]),
            latency=gpu.latency * MS,
            bandwidth=gpu.network_bandwidth * share / MS,
            pass_overhead=gpu.pass_time * MS,
            offload_bandwidth=copies,
            reload_bandwidth=copies,
            copy_size=COPY_SIZE,
            tokens=self.job.sequence,
            time_unit="ms",
            memory_unit="bytes",
        )
        return gpu.calibration.applied(computed) if gpu.calibration.source else computed

    def beside(self, stages: int) -> float:
        """Seconds of a step that no pass has, on a rank with its share of the layers: what is not hidden of the traffic
        between pipelines, weights gathered and gradients reduced behind one microbatch's passes, and the optimizer's
        step. Raises ValueError as `costs`, and for several stages that are fully sharded.
        """
        if self.job.fully_shard and stages > 1:
            raise ValueError(
                "stages hold weights and gradients from pass to pass; leave fully_shard out, or have one stage"
            )
        layers, gpu = _layers(self), self.hardware
        behind = gpu.overlap_share * sum(layer.forward + layer.backward + layer.weight for layer in layers)
        traffic = 0.0 if self.job.fully_shard else sum(layer.gathered + layer.reduced for layer in layers)
        step = sum(layer.stepped for layer in layers)
        return gpu.calibration.rest * (max(0.0, traffic - behind) + step) / stages

    def tokens(self, microbatches: int) -> int:
        """Of a step, of all pipelines."""
        return microbatches * self.job.tokens * self.job.pipelines

    @property
    def limit(self) -> float:
        """Bytes that a rank may hold: it communicates in the pipeline, and in a group for each other parallelism."""
        job = self.job
        parallel = (job.tensor_parallel, job.expert_parallel, job.context_parallel, job.pipelines)
        return self.hardware.usable(1 + sum(ranks > 1 for ranks in parallel))


def _layers(setting: Setting) -> list[Operations]:
    """In model order."""
    architecture, _, job = setting
    if job.expert_parallel > 1 and architecture.experts is None:
        raise ValueError(
            f"model_costs: expert_parallel must be 1 for a model without experts; got {job.expert_parallel}"
        )
    equal = {block: _blocks(block, setting) for block in dict.fromkeys(architecture.blocks)}
    layers = [_embedding(setting)]
    for number, block in enumerate(architecture.blocks):
        for layer in map(copy, equal[block]):
            layer.name = f"{architecture.names[1]}.{number}{layer.name}"
            layers.append(layer)
    layers.append(_head(architecture.names[2], setting))
    for name in architecture.predictor_names:
        layers += *_blocks(architecture.blocks[-1], setting, name), _head(f"{name}.shared_head", setting)
    if job.fully_shard:
        for layer in layers:
            layer.wait_for_shards()
        largest = max(reversed(layers), key=lambda layer: layer.whole)  # the head, where it is tied to the embedding
        largest.static += 2 * job.weight_bytes * largest.whole  # its own, and those of the layer before or after it
    return layers


class Operations:
    """Adds up those of one layer for one microbatch on one GPU: seconds, and bytes. features: of a token."""

    def __init__(self, name: str, features: int, hardware: Hardware, job: Job, tied: str | None = None) -> None:
        self.name, self.tied, self.features, self.hardware, self.job = name, tied, features, hardware, job
        self.forward = self.backward = self.weight = self.saving = 0.0
        self.gathered = self.reduced = self.stepped = self.whole = self.messages = self.waits = 0.0
        self.all_to_alls = self.collectives = 0.0  # of messages, the time of those; and how many they are
        self.network_forward = self.network_backward = 0.0
        self.activation = self.held = self.static = 0.0
        self.attention_forward = self.attention_backward = self.overhead = self.carried = 0.0

    def linear(
        self, rows: float, inputs: float, outputs: float, matrices: float = 1, replicas: float = 0, peak: float = 0
    ) -> None:
        """Products of so many rows in all with `matrices` weights [outputs, inputs], which this GPU has.

        replicas: as for `weights`. peak: that of F and B, 0 for that of bf16.
        """
        gpu = self.hardware
        share = gpu.matmul_share * (1.0 if matrices == 1 else gpu.expert_share)
        size = matrices * inputs * outputs
        wide, narrow = gpu.matmul_flops, peak or gpu.matmul_flops  # of W, of F and B

        def times(rows: float) -> tuple[float, float, float]:
            """Of F or B, of W, and of a W that is merged, which reads and writes the gradient once with others."""
            edges = gpu.steepness * gpu.matmul_ramp * (matrices / rows + 1 / inputs + 1 / outputs)
            product = (1 + edges) * 2 * rows * inputs * outputs / share
            moved = WIDTH * rows * (inputs + outputs)
            quantised = self.seconds(_QUANTISED * rows * inputs) if narrow != wide else 0.0
            kinds = ((gpu.forward_backward_share * narrow, WIDTH * size), (wide, 2 * WIDE * size), (wide, 0))
            through, alone, merged = (max(product / most, self.seconds(moved + more)) for most, more in kinds)
            return through + quantised, alone, merged

        (through, alone, merged), some = times(rows), times(_SOME * rows)
        self.forward += through
        self.backward += through
        self.weight += alone
        self.saving += alone - merged
        fixed = [(part - _SOME * whole) / (1 - _SOME) for part, whole in zip(some, (through, alone), strict=False)]
        self.overhead += (2 * fixed[0] + fixed[1]) / 3
        self.weights(size, replicas)

    def core(self, core: Core) -> None:
        """Two products forward, five backward, no weights; of short sequences less than its share.

        What short ones take longer is some keys more for every query, which is no part of the context.
        """
        gpu, job = self.hardware, self.job
        flops = job.rows * core.flops(job.sequence) / job.tensor_parallel / gpu.matmul_flops
        flops *= 1 + gpu.steepness * gpu.softmax_share * (128 / core.size - 1)
        more = 1 + gpu.steepness * gpu.attention_ramp / job.sequence
        rising = rising_share(1.0 if core.window is None else min(1.0, core.window / job.sequence))
        self.attention_forward += rising * flops / gpu.attention_forward_share
        self.attention_backward += rising * 2.5 * flops / gpu.attention_backward_share
        self.forward += more * flops / gpu.attention_forward_share
        self.backward += more * 2.5 * flops / gpu.attention_backward_share

    def part(self, part: Part) -> None:
        """Attention, an MLP or experts: products, core and the rest, for this GPU's share of them."""
        job = self.job
        part = part.of(job.tensor_parallel)
        rows = job.rows / job.tensor_parallel
        if part.experts is not None and job.expert_parallel > 1:
            self.dispatch_and_combine(rows, part.experts)
        else:
            self.gather_and_scatter()
        for product in part.products:
            self.product(product, part.experts)
        if part.core is not None:
            self.core(part.core)
            ranks = job.context_parallel  # keys and values go around the GPUs of a sequence
            gpu, neighbours = self.hardware, ranks * job.tensor_parallel
            self.exchange(rows * part.keys, ranks, neighbours, gpu.network_share, gpu.exposed_share)
        self.elementwise(rows, *part.moved)
        self.keep(rows, part.kept, part.held)
        self.weights(part.other / job.tensor_parallel)
        self.carried += WIDTH * rows * part.carried

    def product(self, product: Product, experts: Experts | None) -> None:
        """A row of the table."""
        job, inputs, outputs = self.job, product.inputs, product.outputs
        ranks, rows, matrices, replicas = job.tensor_parallel, job.rows, 1.0, 0.0
        if product.grouped and experts is not None:
            rows, matrices = rows * experts.chosen, experts.count / job.expert_parallel
        if product.divided == "tokens" or (product.grouped and job.expert_parallel > 1):
            rows /= ranks
        elif product.divided == "inputs":
            inputs /= ranks  # type: ignore[assignment]
        else:
            outputs /= ranks  # type: ignore[assignment]
        if product.grouped and job.expert_parallel > 1:  # as many rows come back from others as go there
            replicas = job.replicas * ranks / job.expert_parallel
        narrow = 0.0 if product.grouped or not job.fp8 else self.hardware.fp8_flops or 0.0
        self.static += 2 * inputs * outputs if narrow else 0.0  # in 8 bits, both ways round, while a step runs
        self.linear(rows, inputs, outputs, matrices, replicas, narrow)

    def elementwise(self, rows: float, forward: float, backward: float) -> None:
        """So many numbers read or written per row."""
        self.forward += self.seconds(WIDTH * rows * forward)
        self.backward += self.seconds(WIDTH * rows * backward)

    def keep(self, rows: float, activation: float, held: float) -> None:
        """So many numbers per row, from F to B and from B to W."""
        self.activation += WIDTH * rows * activation
        self.held += WIDTH * rows * held

    def weights(self, count: float, replicas: float = 0) -> None:
        """Parameters on this GPU, whose optimizer state so many replicas share; 0 for all pipelines."""
        copies = replicas or self.job.replicas
        shards = copies if self.job.fully_shard else 1
        self.static += count * (self.job.weight_bytes / shards + self.job.optimizer_bytes / copies)
        self.whole += count if shards > 1 else 0
        self.stepped += self.seconds(_STEP * count / copies)
        if copies > 1:
            gpu = self.hardware
            near = in_a_node(gpu.gpus_per_node, self.job.expert_parallel if replicas else self.job.tensor_parallel)
            links = gpu.links(int(min(copies, near)))
            bandwidth = links if copies <= near else min(near * gpu.network_bandwidth, gpu.link_bandwidth)
            time = count * (copies - 1) / copies / (bandwidth * gpu.network_share)
            self.gathered += WIDTH * time
            self.reduced += (WIDE if self.job.fully_shard else _REDUCED) * time

    def wait_for_shards(self) -> None:
        """What gathering weights for F and B and reducing gradients takes beyond the passes that hide it."""
        hidden = self.hardware.overlap_share
        self.forward += max(0.0, self.gathered - hidden * self.forward)
        self.backward += max(0.0, self.gathered + self.reduced - hidden * (self.backward + self.weight))

    def gather_and_scatter(self) -> None:
        """Tensor parallelism around attention or an MLP: an all-gather and a reduce-scatter, forward and backward."""
        gpu, ranks = self.hardware, self.job.tensor_parallel
        numbers = 2 * self.job.rows * self.features / ranks
        self.exchange(numbers, ranks, ranks, gpu.tensor_share, gpu.tensor_exposed_share)

    def exchange(self, numbers: float, ranks: int, neighbours: int, share: float, exposed: float) -> None:
        """Each of `ranks`, among so many neighbours, sends so many numbers to every other one; as for `_message`."""
        gpu = self.hardware
        if ranks > 1:
            bandwidth = gpu.links(ranks) if neighbours <= gpu.gpus_per_node else gpu.network_bandwidth
            self._message(WIDTH * numbers * (ranks - 1) / bandwidth, share, exposed)

    def dispatch_and_combine(self, tokens: float, experts: Experts) -> None:
        """Expert parallelism: tokens go to the GPUs of their experts and return, forward and backward.

        A token travels once to every node that has some of its experts, to the GPU with its own GPU's place there, and
        is handed on to every GPU there that has some while the next ones travel (arXiv 2412.19437, section 3.2.2). What
        goes to its own node or GPU takes no time.
        """
        gpu, ranks, size = self.hardware, self.job.expert_parallel, WIDTH * tokens * self.features
        if experts.count % ranks:
            raise ValueError(f"model_costs: expert_parallel must divide the {experts.count} experts; got {ranks}")
        inside, here = min(ranks, gpu.gpus_per_node), experts.count // ranks
        gpus = sum(reached(experts, (here,) * ranks))
        places = [here * min(inside, ranks - first) for first in range(0, ranks, inside)]
        nodes = sum(
            share * (1 - place / experts.count)
            for share, place in zip(reached(experts, tuple(places)), places, strict=True)
        )
        time = max(
            nodes * size / (gpu.network_bandwidth * gpu.all_to_all_share),
            gpus * size * (inside - 1) / inside / gpu.links(inside),
        )
        before = self.messages
        self._message(2 * time, gpu.network_share, gpu.exposed_share)
        if self.job.overlap and ranks > 1:
            self.all_to_alls += self.messages - before
            self.collectives += 2

    def seconds(self, moved: float) -> float:
        """For so many bytes of this GPU's memory."""
        return moved / (self.hardware.memory_bandwidth * self.hardware.memory_share)

    def costs(self) -> LayerCosts:
        output = WIDTH * self.job.rows * self.features / self.job.tensor_parallel
        networks = ("network_forward", "network_backward")
        same = ("forward", "backward", "weight", "attention_forward", "attention_backward", "overhead", *networks)
        times = {name: MS * getattr(self, name) for name in same}
        divided = times["backward"] - times["attention_backward"] + times["weight"]  # attention's core has no W
        apart = self.hardware.split_share * divided if self.backward else 0.0
        times |= {"backward": times["backward"] + apart, "split_overhead": apart}
        rest = {name: getattr(self, name) for name in ("activation", "held", "static", "carried", "collectives")}
        rest["carried_gradients"] = WIDE / WIDTH * self.carried
        return LayerCosts(self.name, **times, **rest, merge_saving=MS * self.saving, output=output, tied=self.tied)

    def _message(self, time: float, share: float, exposed: float) -> None:
        """Two messages that take so long together at the peak bandwidth, forward and again backward; share: what they
        get of it; exposed: what of their time is never hidden."""
        time = time / share + 2 * self.hardware.latency
        self.messages += time
        self.waits += exposed * time

    def wait_for_messages(self, *others: Operations) -> None:
        """What F and B take longer for their messages: what computing cannot hide, because it waits or is too short.

        others: the other half of a block, each of which hides messages of both.
        """
        gpu, layers = self.hardware, (self, *others)
        messages, waits = (sum(getattr(layer, name) for layer in layers) for name in ("messages", "waits"))
        for name in ("forward", "backward"):
            hidden = gpu.hiding_share * sum(getattr(layer, name) for layer in layers)
            exposed = max(waits, messages - hidden)
            for layer in layers if messages else ():
                setattr(layer, name, getattr(layer, name) + exposed * layer.messages / messages)
                setattr(layer, f"network_{name}", exposed * layer.all_to_alls / messages)  # what nothing hides yet

    def wait_for_unfused(self, parts: Sequence[Part]) -> None:
        """What no kernel joins is between a token's way to its experts and back, and hides neither."""
        rows = self.hardware.unfused_share * self.job.rows / self.job.tensor_parallel
        for part in parts:
            self.elementwise(rows, *part.unfused)


def rising_share(window: float) -> float:
    """The share of attention's time that grows with the length times all that came before, in slices of a sequence.

    A window w of the sequence gives a query the context min(x, w) at x. That is taken for a constant, which makes the
    time grow with the length, and a part that rises with x: the one with the least squares of the difference.
    """
    return window * (3 - 2 * window) / (2 - window)


def _embedding(setting: Setting) -> Operations:
    architecture, hardware, job = setting
    features, tied = architecture.features, "embedding" if architecture.tied else None
    layer = Operations(architecture.names[0], features, hardware, job, tied)
    ranks, rows = job.tensor_parallel, job.rows / job.tensor_parallel
    layer.elementwise(rows, 2 * features, 0)
    layer.weight += layer.seconds(rows * features * (WIDTH + 2 * WIDE))  # its whole backward is W
    layer.keep(rows, 0, features)
    layer.weights(architecture.vocabulary * features / ranks)
    return layer


def _head(name: str, setting: Setting) -> Operations:
    """The last norm, and the head with its loss: F computes the logits and the input's gradient, W the logits again."""
    architecture, hardware, job = setting
    features, tied = architecture.features, "embedding" if architecture.tied else "head"
    layer = Operations(name, features, hardware, job, tied)
    ranks, rows = job.tensor_parallel, job.rows / job.tensor_parallel
    layer.elementwise(rows, 2 * features, 4 * features)
    layer.linear(job.rows, features, architecture.vocabulary / ranks)
    twice = layer.backward - layer.seconds(WIDTH * rows * 4 * features)
    layer.forward, layer.backward, layer.weight = layer.forward + twice, layer.backward - twice, layer.weight + twice
    layer.gather_and_scatter()
    layer.wait_for_messages()
    layer.keep(rows, 3 * features, features)  # input, its norm, and its gradient
    # the logits that F or W has at a time, whose gradient takes their place
    layer.static += WIDTH * min(_LOGITS, job.rows) * architecture.vocabulary / ranks
    return layer


def _blocks(block: Block, setting: Setting, predictor: str = "") -> list[Operations]:
    """One, or two, whose names are how those of halves end; for a predictor of that name always one."""
    architecture, hardware, job = setting
    halves = block.halves if job.halves and not predictor else (block.parts,)
    names, share = (HALVES, 0.5) if halves[1:] else ((predictor,), 1.0)
    layers = [
        _block(
            Operations(name, architecture.features, hardware, job), replace(block, parts=parts), share, bool(predictor)
        )
        for name, parts in zip(names, halves, strict=True)
    ]
    layers[0].wait_for_messages(*layers[1:])
    for layer, parts in zip(layers, halves, strict=True):
        layer.wait_for_unfused(parts)
    return layers


def _block(layer: Operations, block: Block, share: float, joined: bool) -> Operations:
    """With what it computes, and no wait for messages. share: of norms, sums and launches, in half a block. joined:
    with the product in front that joins a predictor's two inputs."""
    hardware, job = layer.hardware, layer.job
    features, norms = layer.features, share * block.norms
    launches = share * hardware.layer_time + (hardware.expert_time if block.experts else 0.0)
    layer.forward = layer.backward = layer.weight = layer.overhead = launches
    rows = job.rows / job.tensor_parallel  # outside of the layers that are split
    layer.elementwise(rows, norms * 2 * features + share * 2 * features, norms * 4 * features)
    layer.keep(rows, norms * features, 0)  # the inputs of the norms
    if joined:
        layer.linear(rows, 2 * features, features)
        layer.keep(rows, 2 * features, 3 * features)
    for part in block.parts:
        layer.part(part)
    return layer
