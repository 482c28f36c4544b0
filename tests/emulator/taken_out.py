"""Takes one barrier, wait or fence after another out of compiled kernels: does the emulator notice?

    python -m tests.emulator.taken_out --capability 80 90 --seeds 0 1

What goes unnoticed stays out. So of two barriers that order the same, one must be missed in the end; what is left are
those that the kernel needs, and docs/emulator.md says of the others why it does not.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from tests.emulator import gpu
from tests.emulator.cases import BF16, FP32, PLAIN, Case, faults
from tests.support import attention_checks, row_checks
from tests.support import launch_checks as checks
from zbkern.kernels.spec import CrossEntropyOptions

BARRIERS = {"bar.sync": r"^\s*bar\.sync[^;]*;"}
KINDS = {
    80: {
        **BARRIERS,
        "cp.async.wait_group": r"^\s*cp\.async\.wait_group[^;]*;",
        "cp.async.commit_group": r"^\s*cp\.async\.commit_group\s*;",
    },
    90: {
        **BARRIERS,
        "mbarrier wait": r"^\s*@!complete bra\.uni waitLoop;",
        "fence.proxy.async": r"^\s*fence\.proxy\.async[^;]*;",
        "wgmma.wait_group": r"^\s*wgmma\.wait_group[^;]*;",
        "wgmma.fence": r"^\s*wgmma\.fence[^;]*;",
        "cp.async.bulk.wait_group": r"^\s*cp\.async\.bulk\.wait_group[^;]*;",
        "expect_tx": r"^\s*@%p\d+ mbarrier\.arrive\.expect_tx[^;]*;",
    },
}
KINDS[100] = {kind: pattern for kind, pattern in KINDS[90].items() if "wgmma" not in kind} | {
    "tcgen05.wait": r"^\s*tcgen05\.wait::[^;]*;\s*bar\.sync\s+0;",
    "tcgen05.commit": r"^\s*@%p\d+ tcgen05\.commit[^;]*;",
}


class Tried(NamedTuple):
    """found: the faults without it. place: which of that kind in the kernel."""

    capability: int
    kernel: str
    kind: str
    place: int
    found: list[str]


def cases() -> list[Case]:
    """A product and a sum of products, with two groups of warps and two tiles for the only program; attention; a head
    with its loss, which overwrites its logits."""

    def product(launches: ModuleType) -> None:
        checks.linear_fwd(launches, checks.Random(BF16, "cpu", scale=0.5), 130, 200, 328, bias=True)

    def products(launches: ModuleType) -> None:
        random = checks.Random(BF16, "cpu", scale=0.5)
        checks.linear_wgrad(launches, random, [200, 77], 136, 200, PLAIN, FP32, True, False)

    def attention(launches: ModuleType) -> None:
        attention_checks.attention(launches, BF16, [200], size=64)

    def loss(launches: ModuleType) -> None:
        random = checks.Random(BF16, "cpu", scale=0.2)
        row_checks.cross_entropy(launches, random, [5], 300, 16, CrossEntropyOptions())

    return [
        *(Case("linear_fwd", product, True), Case("linear_wgrad", products, True), Case("attention", attention)),
        Case("cross_entropy", loss),
    ]


def tried(capability: int, case: Case, kinds: Sequence[str], seeds: Sequence[int]) -> Iterator[Tried]:
    """One after the other taken out, beside all those before it that went unnoticed."""
    places: dict[tuple[str, str], int] = {}
    gone: set[tuple[str, str, int]] = set()

    def load(real: Callable[..., Any], name: str, code: bytes, *more: object) -> Any:
        text = code.decode()
        found = [(kind, list(re.finditer(KINDS[capability][kind], text, re.MULTILINE))) for kind in kinds]
        places.update({(name, kind): len(those) for kind, those in found})
        away = {one.span() for kind, those in found for i, one in enumerate(those) if (name, kind, i) in gone}
        for begin, end in sorted(away, reverse=True):
            text = text[:begin] + text[end:]
        return real(name, text.encode(), *more)

    def without() -> list[str]:
        gpu.forget()
        with mock.patch.object(utils, "load_binary", functools.partial(load, utils.load_binary)):
            return sorted(faults(case, capability, seeds, processors=1)[0])

    utils = gpu.driver(capability).utils
    try:
        assert not without()
        for (name, kind), count in list(places.items()):
            for place in range(count):
                gone.add((name, kind, place))
                found = without()
                if found:
                    gone.remove((name, kind, place))
                yield Tried(capability, name, kind, place, found)
    finally:
        gpu.forget()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    counts: Counter[tuple[int, str, str, bool]] = Counter()
    for capability, case in itertools.product(arguments.capability, cases()):
        if arguments.only in case.name:
            for one in tried(capability, case, list(KINDS[capability]), arguments.seeds):
                counts[capability, one.kernel, one.kind, bool(one.found)] += 1
                what = f"sm_{capability} {one.kernel:<10} without {one.kind} {one.place}"
                print(f"{what:<60} {', '.join(one.found) or 'not noticed'}", flush=True)
    for key in dict.fromkeys(key[:3] for key in counts):
        noticed, unnoticed = (counts[(*key, found)] for found in (True, False))
        print(f"sm_{key[0]} {key[1]:<10} {key[2]:<26} {noticed} of {noticed + unnoticed} noticed")


if __name__ == "__main__":
    main()
