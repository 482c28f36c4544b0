"""What the driver would refuse of a launch: checked where there is no driver.

Rules: cuTensorMapEncodeTiled in the CUDA driver API; Triton cuts a block into boxes of at most 256 rows and the width
of a swizzle, so that these are not checked. The kernels make descriptors without Triton's own checks (matmul_tile.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

MOST_PARAMETERS = 32764
"""Bytes of arguments, from CUDA 12.1 and compute capability 7.0 on."""


def faults_of_runs(runs: Iterable[tuple[str, Callable[[], object]]]) -> list[str]:
    """What would be refused of the launches of (name, run), on tensors of a CPU; nothing is launched."""
    from zbkern.kernels.triton.common import Kernel
    from zbkern.kernels.triton.replay import replay

    found: list[str] = []
    with replay.paused(), mock.patch.object(Kernel, "__call__") as launch:
        for name, run in runs:
            launch.reset_mock()
            run()
            for call in launch.call_args_list:
                found += [f"{name}: {fault}" for fault in faults(call.args[1])]
    return found


def faults(arguments: Sequence[Any]) -> list[str]:
    """What is wrong with a launch's arguments."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    found, size = [], 0
    for place, argument in enumerate(arguments):
        if isinstance(argument, TensorDescriptor):
            found += [f"argument {place}: {fault}" for fault in descriptor_faults(argument)]
            size += 128 + 16 * len(argument.shape)
        else:
            size += 8 * (argument is not None)
    return found + ([f"{size} bytes of arguments, more than {MOST_PARAMETERS}"] if size > MOST_PARAMETERS else [])


def descriptor_faults(descriptor: Any) -> list[str]:
    """What the driver would refuse of a descriptor."""
    itemsize, rank = descriptor.base.dtype.itemsize, len(descriptor.shape)
    strides = [stride * itemsize for stride in descriptor.strides[:-1]]
    box = descriptor.block_shape[-1] * itemsize
    checks = {
        f"{rank} dimensions": 1 <= rank <= 5,
        "shape, strides and block of different lengths": rank == len(descriptor.strides) == len(descriptor.block_shape),
        f"it begins at {descriptor.base.data_ptr() % 16} bytes after a multiple of 16": not (
            descriptor.base.data_ptr() % 16
        ),
        f"lengths {descriptor.shape}": all(0 < length <= 2**32 for length in descriptor.shape),
        f"steps of {strides} bytes": all(stride % 16 == 0 and 0 < stride < 2**40 for stride in strides),
        f"neighbours {descriptor.strides[-1]} apart": descriptor.strides[-1] == 1,
        f"blocks of {box} bytes a row": box % 16 == 0 and box > 0,
    }
    return [fault for fault, fine in checks.items() if not fine]
