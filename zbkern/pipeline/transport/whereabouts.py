"""Where a thread is: for the error of a rank that others wait for, which may be in a collective of its own."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import PurePath
from types import FrameType

_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<")


def whereabouts(thread: int) -> str:
    """ " in torch.distributed.distributed_c10d.all_gather, at run/train.py:42": the function of torch that a thread is
    in, if any, and the line of the user's program; "" where neither is known.

    thread: as `threading.get_ident` gives it.
    """
    frame = sys._current_frames().get(thread)
    text = ""
    if frame is not None and _module_of(frame).startswith("torch."):
        text = f" in {_module_of(frame)}.{frame.f_code.co_name}"
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSTALLED) and not _module_of(frame).startswith("zbkern."):
            return f"{text}, at {'/'.join(PurePath(name).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return text


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
