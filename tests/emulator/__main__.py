"""Runs compiled kernels in the emulator of PTX, a row for each case; returns 1 where one has a fault.

python -m tests.emulator --capability 80 90 --dtype bf16 fp32 --seeds 0 1 2 --only linear_wgrad
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.emulator.cases import DTYPES, cases, faults_at


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90, 100, 120])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    wanted = [
        (capability, dtype, index, case.name)
        for capability, dtype in itertools.product(arguments.capability, arguments.dtype)
        for index, case in enumerate(cases(capability, DTYPES[dtype]))
        if any(text in case.name for text in arguments.only)
    ]
    counts: Counter[tuple[int, str, str]] = Counter()
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = [pool.submit(faults_at, *place, arguments.seeds) for *place, _ in wanted]
        for (capability, dtype, _, name), done in zip(wanted, rows, strict=True):
            found, launched, seconds = done.result()
            verdict = "; ".join(found) or "ok"
            counts[capability, dtype, "bad" if found else "ok"] += 1
            what = f"sm_{capability} {dtype} {name:<66}"
            print(f"{what} {launched:>4} launches {seconds:>7.2f} s  {verdict}", flush=True)
            for kind, text in found.items():
                print(f"        {kind}: {text[:700]}", flush=True)
    for key, count in sorted(counts.items()):
        print(*key, count)
    return int(any(verdict == "bad" for *_, verdict in counts))


if __name__ == "__main__":
    sys.exit(main())
