"""Registers, spills, shared memory and instructions of every Triton kernel, compiled for GPUs that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from build_tools.kernels import aot as triton_aot
from build_tools.kernels import launches
from build_tools.kernels import sass as triton_sass


def main(argv: list[str] | None = None) -> int:
    """Prints a table, or one JSON object per line; returns 1 when a kernel has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--capability", type=int, action="append", help="80, 90, 100; all when not given")
    parser.add_argument("--launched", action="store_true", help="everything that calls can select: half an hour")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, help="processes that compile, one for each core when not given")
    arguments = parser.parse_args(argv)
    bad = 0
    if triton_sass.disassembler() is None:
        print("nvdisasm was not found, so the machine code is not checked; set NVDISASM to its path", file=sys.stderr)
    if not arguments.json:
        columns = f"{'regs':>5} {'stack':>5} {'shared KB':>9} {'loop KB':>7}  PTX has"
        print(f"{'kernel':<44} {'sm':>4} {'warps':>5} {'stages':>6} {columns}")
    capabilities = arguments.capability or triton_aot.CAPABILITIES
    wanted = launches.all_runs if arguments.launched else launches.runs
    found = [named for capability in capabilities for named in launches.jobs(capability, wanted)]
    for report in triton_aot.reports([named for named in found if arguments.only in named.name], arguments.jobs):
        faults = report.faults()
        bad += bool(faults)
        if arguments.json:
            print(json.dumps({**dataclasses.asdict(report), "faults": faults}), flush=True)
            continue
        loop = f"{'-':>7}" if report.code is None else f"{report.code.loop / 1024:>7.1f}"
        counts = ", ".join(f"{n} {name}" for name, n in report.instructions.items() if n)
        found = "".join(f"  FAULT: {fault}" for fault in faults)
        print(
            f"{report.name:<44} {report.capability:>4} {report.warps:>5} {report.stages:>6} {report.registers:>5} "
            f"{report.stack:>5} {report.shared / 1024:>9.1f} {loop}  {counts}{found}",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
