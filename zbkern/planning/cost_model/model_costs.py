"""Costs of a model on a GPU, from flops and bytes alone: for planning before there is a machine to measure on.

A model, and no measurement. A matrix product takes as long as its flops or its bytes, whichever is longer, at the
shares of the peaks that `Hardware` names, a small one longer; attention, at shares of its own, computes what its mask
leaves; other operations take their bytes; every layer and every pass takes some time of its own. docs/cost_model.md
says what is assumed besides. Of a sequence in slices keys and values of all heads stay, also where their layer has a
window or makes them from small vectors, as caches of the transformers library have them.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import NamedTuple

from zbkern.planning.cost_model.architecture import Architecture, Block
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.operations import MS, WIDE, WIDTH, Operations
from zbkern.planning.costs.chunks import COPY_SIZE
from zbkern.planning.costs.layers import ModelCosts
from zbkern.schedules.layout import HALVES

_LOGITS = 1024  # rows whose logits a head has at a time: `CrossEntropyOptions.chunk`


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
