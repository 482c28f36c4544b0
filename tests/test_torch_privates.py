"""Every private name of torch that zbkern looks up, with its reason: the list to read when a new torch comes out.

Not listed are attributes of torch's objects (`_version`, `_modules`, `_local_tensor`), which have no path of their own.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parent.parent / "zbkern"
USED = {
    "torch._C.DisableTorchFunction": "gradients are cleared, and parts of a block run, without the mode that watches",
    "torch._C.DisableTorchFunctionSubclass": "torch's own way to run an operation inside __torch_function__",
    "torch._C._autograd._enable_record_function": "gloo's sends are in no profile, which ends before they do",
    "torch._C._autograd._get_current_graph_task_keep_graph": "whether backward() may come again: the head then keeps",
    "torch._C._autograd._get_sequence_nr": "whether a backward makes more nodes than before: checkpoints may be on",
    "torch._C._autograd._top_saved_tensors_default_hooks": "whether saved tensors go through hooks of someone else's",
    "torch._C._cuda_getCurrentRawStream": "the stream of a launch, without a Python object around it",
    "torch._C._current_autograd_node": "which backward a compiled operator runs in",
    "torch._C._current_graph_task_id": "which backward runs, so that W is added once at its end",
    "torch._C._dispatch_key_parse": "the key of torch.vmap",
    "torch._C._dispatch_keys": "whether torch.vmap is around a tensor",
    "torch._C._functorch.peek_interpreter_stack": "whether a function transform is around a call",
    "torch._C._is_any_autocast_enabled": "one look before those for each device, in every call",
    "torch._C._len_torch_dispatch_stack": "whether a dispatch mode counts or traces products",
    "torch._C._storage_Use_Count": "whether memory that recomputation freed is still seen by someone",
    "torch._C._will_engine_execute_node": "whether this backward wants a weight: autograd.grad of inputs does not",
    "torch._dynamo": "whether compiled autograd is on, under which W stays in B",
    "torch._foreach_copy_": "many small tensors in one launch",
    "torch._foreach_mul_": "many small tensors in one launch",
    "torch._foreach_norm": "many small tensors in one launch",
    "torch._grouped_mm": "the grouped product before torch.nn.functional.grouped_mm",
    "torch._higher_order_ops": "operators with effects, before torch 2.10",
    "torch._inductor": "memory that a deferred W reads is not used again by compiled code",
    "torch._library": "operators with effects, since torch 2.10",
    "torch.autograd.Variable._execution_engine": "a callback at the end of backward, as FSDP2 and DDP have; a B",
    "torch.autograd._profiler_enabled": "whether names of actions are worth their time",
    "torch.autograd.forward_ad._current_level": "whether forward-mode AD is around a call",
    "torch.compiler._is_exporting_flag": "is_exporting() is True in what older compilers trace",
    "torch.cuda._sleep": "a known delay on a stream, in zbkern.testing",
    "torch.distributed._Work": "what a wrapped group returns: a wait lets other passes of the rank run first",
    "torch.distributed._composable_state": "which FSDP2 modules there are",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "what a checkpoint's metadata is made of",
    "torch.distributed.distributed_c10d._get_default_group": "the group to wrap where none is named",
    "torch.distributed.distributed_c10d._get_default_store": "the store that init_process_group has",
    "torch.distributed.distributed_c10d._register_process_group": "functional collectives find a wrapped group by name",
    "torch.distributed.distributed_c10d._world": "what torch.distributed knows of a group, for a wrapped one",
    "torch.distributed.tensor._utils": "where this rank's part of a DTensor begins",
    "torch.nn.modules.batchnorm._BatchNorm": "the base of all batch norms",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": "whether a forward runs inside of DDP",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "the CPU's attention with its logsumexp",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "and its backward",
    "torch.ops.aten._unsafe_view": "an output that is no view for autograd, so that it may be modified in place",
    "torch.ops.mkldnn._linear_pointwise": "oneDNN's product where MKL's is slow",
    "torch.overrides._get_current_function_mode": "whether interception, or what waits for weights, is on",
    "torch.overrides._get_current_function_mode_stack": "modes of the calling thread, for passes in other threads",
    "torch.utils._device": "the one mode that others' ends are never taken for",
    "torch.utils._python_dispatch": "whether a tensor is made of others, and a trial that checkpoints do not count",
    "torch.utils._pytree": "nested containers of tensors, as torch.distributed.pipelining has them",
}
ELSEWHERE = {"torch._C._cuda_getCurrentRawStream"}  # a build for CUDA has it


def private(path: str) -> str | None:
    """A dotted path up to its first private part, or further where that is torch._C or a part of it."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        inside = parts[:2] == ["torch", "_C"] and (index < 2 or part in ("_autograd", "_functorch"))
        if not inside and (parts[:2] == ["torch", "_C"] or (part.startswith("_") and not part.startswith("__"))):
            return ".".join(parts[: index + 1])
    return None


def used_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    known = {name: target for name, target in known.items() if target.split(".")[0] == "torch"}

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute):
            before = dotted(node.value)
            return before and f"{before}.{node.attr}"
        return known.get(node.id) if isinstance(node, ast.Name) else None

    found = {*known.values(), *(path for node in ast.walk(tree) if (path := dotted(node)) is not None)}
    return {name for path in found if (name := private(path)) is not None and not name.endswith("._fields")}


def test_the_list_is_complete() -> None:
    found = set().union(*map(used_in, PACKAGE.rglob("*.py")))
    assert found - USED.keys() == set(), "give each its reason here"
    assert USED.keys() - found == set(), "no longer used"


@pytest.mark.parametrize("name", [name for name in USED if name not in ELSEWHERE])
def test_this_torch_has_it(name: str) -> None:
    parts, value = name.split("."), torch
    for index, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:index]))  # a module that nobody has imported yet
        value = getattr(value, part)
