"""Memory of this process, as the operating system counts it."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

M_MMAP_THRESHOLD = -3


class Resident:
    """Within it, `peak` and at its end `growth`: bytes that this process has more than at the beginning."""

    def __enter__(self) -> Resident:
        give_back_what_is_free()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = _status("VmHWM") - self._before
        give_back_what_is_free()
        self.growth = _status("VmRSS") - self._before


def give_back_what_is_free() -> None:
    """To the operating system, which from now on gets back what a tensor had, too; but for holes in the heap."""
    gc.collect()  # else garbage may go during the step that is measured
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)


def _status(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
