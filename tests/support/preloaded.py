"""What the processes of tests' ranks are forked from: it has imported what they need, which takes seconds."""

import contextlib
import gc
import importlib

gc.disable()
for name in (
    "pytest",
    "torch._dynamo",  # torch's optimizers import it
    "torch.distributed.fsdp",
    "zbkern.nn",
    "zbkern.pipeline.checkpoint",
    "zbkern.pipeline.runtime.engine",
):
    importlib.import_module(name)
with contextlib.suppress(ImportError):  # of the optional library, what its models import
    importlib.import_module("transformers.models.llama.modeling_llama")

# A collection in a rank would visit every object of these modules, and so copy it: a third of a second of each rank.
gc.collect()
gc.freeze()
gc.enable()
gc.set_threshold(50_000, 20, 20)  # as in conftest.py
