"""Compiles what calls of the Triton kernels launch for GPUs that are not here, and says what came out."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from build_tools.kernels import pending
from build_tools.kernels import sass as triton_sass
from build_tools.kernels.jobs import compile_job
from build_tools.kernels.launches import Named
from zbkern.kernels.tiles import SHARED_MEMORY, unit

CAPABILITIES = (80, 89, 90, 100, 120)

TENSOR_MEMORY = 512
"""Columns of an SM's tensor memory, from 10.0 on. For a kernel that asks for more Triton writes an empty one."""

INSTRUCTION_CACHE = 128 * 1024
"""Bytes of code that an SM keeps near; of a loop that is larger each turn waits for its own instructions."""

CALL_FRAME = 8
"""Bytes of stack without a spill where there are bulk copies on 12.x: each may become a call of the driver's."""

SCANNED = 90
"""The capability whose machine code is looked at: nvdisasm takes half a second for the smallest kernel, and only Hopper
has products that read and write registers while others go on."""

NARROW_ACCESSES = 4
"""Global accesses of one or two bytes that a kernel may have: a row's statistics and the like."""


@dataclass(frozen=True)
class Report:
    """One variant compiled for one capability. stack: bytes per thread, 0 unless registers spill.

    tensor_memory: columns of it. instructions: of the kinds that matter, how many are in the PTX. ahead: copies of
    operands that begin before the loop that multiplies, None where there is no such loop: two operands in `stages`
    stages make 2 (stages - 1). warnings: ptxas's, on products that it serialises (the C75xx family). code: what the
    machine code says, None where there is no nvdisasm, and of other GPUs than SCANNED. touched: its
    instructions that touch registers of a product under way. aligned: its arguments allow
    accesses of 16 bytes. shallow: rings of operands in which a copy overwrites what a product reads.
    """

    module: str
    name: str
    capability: int
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    instructions: dict[str, int]
    wgmma: bool
    bulk: bool
    ahead: int | None = None
    tensor_memory: int = 0
    ordered: bool = True
    warnings: Sequence[str] = ()
    code: triton_sass.Findings | None = None
    touched: Sequence[str] = ()
    aligned: bool = True
    shallow: Sequence[str] = ()

    def faults(self) -> list[str]:
        """Everything in the report that a production kernel must not have."""
        found = []
        if self.stack > (CALL_FRAME if self.bulk and self.capability >= 120 else 0):
            found.append(f"spills: {self.stack} bytes of stack per thread")
        limit = 1024 * SHARED_MEMORY[self.capability]
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory, more than {limit}")
        if self.tensor_memory > TENSOR_MEMORY:
            found.append(f"{self.tensor_memory} columns of tensor memory, more than {TENSOR_MEMORY}")
        if not self.ordered:
            found.append("a product may overwrite tensor memory that other warps still read")
        product = unit(self.capability)
        if self.wgmma and not self.instructions[product]:
            found.append(f"multiplies matrices without {product}")
        if self.bulk and self.capability >= 90 and not self.instructions["bulk copies"]:
            found.append("uses descriptors without bulk tensor copies")
        if self.ahead is not None and self.ahead < self.stages:
            found.append(f"only {self.ahead} copies run ahead of its loop, in {self.stages} stages")
        found += [f"a copy overwrites what a product still reads ({ring})" for ring in self.shallow]
        found += [f"touches a product under way: {instruction}" for instruction in self.touched]
        found += [f"ptxas says: {warning}" for warning in self.warnings]
        return found + ([] if self.code is None else self._faults_of(self.code))

    def _faults_of(self, code: triton_sass.Findings) -> list[str]:
        found = []
        if code.products and code.alone == code.products:
            found.append(f"waits for each of its {code.products} products before the next")
        if self.aligned and code.narrow > NARROW_ACCESSES:
            found.append(f"{code.narrow} of {code.accesses} global accesses are of one or two bytes")
        if code.loop > INSTRUCTION_CACHE:
            found.append(f"a loop of {code.loop} bytes, more than the {INSTRUCTION_CACHE} of the instruction cache")
        return found


def reports(found: Sequence[Named], jobs: int | None = None) -> Iterator[Report]:
    """Compiles all in so many processes, one per core when not given; 1 is this process. A job's report is kept in
    `kept_in()`, by all that it depends on: a second run compiles what has changed."""
    files = [kept_in() / "reports" / f"{_key(named)}.json" for named in found]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        begun = {
            file: functools.partial(_compile, named) if jobs == 1 else pool.submit(_compile, named).result
            for named, file in zip(found, files, strict=True)
            if not file.exists()
        }
        for file in files:
            if file in begun:
                _keep(file, json.dumps(asdict(begun[file]())))
            yield _report_of(json.loads(file.read_text()))


def kept_in() -> Path:
    """Where what takes minutes to find out is kept between runs, by its content."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zbkern"


def _keep(file: Path, text: str) -> None:
    """All of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(text)
    beside.replace(file)


def _report_of(found: dict[str, Any]) -> Report:
    code = found.pop("code")
    return Report(**found, code=None if code is None else triton_sass.Findings(**code))


def _key(named: Named) -> str:
    """A hash of all that a report depends on: the kernel's source, Triton, its constants, and these files."""
    from triton.compiler import make_backend
    from triton.runtime.cache import triton_key

    job = named.job
    backend = make_backend(job.target)
    words = (
        *(triton_key(), job.source().hash(), backend.hash(), backend.parse_options(job.options).hash()),
        *(job.kernel, named.name, named.aligned, _digest_of_scan(), triton_sass.disassembler() is None),
    )
    return hashlib.sha256(repr(words).encode()).hexdigest()


_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tcgen05": r"tcgen05\.mma",
    "bulk copies": r"cp\.async\.bulk\.tensor",
    "copies": r"cp\.async\.c[ag]\.",
    "L2 prefetches": r"prefetch\.global\.L2",
}


def _compile(named: Named) -> Report:
    job = named.job
    kernel, capability = compile_job(job), job.target.arch
    cubin, ptx = kernel.asm["cubin"], kernel.asm["ptx"]
    registers, stack = _resources(cubin)
    instructions = {name: len(re.findall(pattern, ptx)) for name, pattern in _INSTRUCTIONS.items()}
    log = _ptxas_log(ptx, capability) if instructions["wgmma"] else ""  # float32 may be multiplied by it, too
    code, touched = None, []
    if capability == SCANNED and triton_sass.disassembler() is not None:
        listing = triton_sass.disassemble(cubin)
        code, touched = triton_sass.scan(listing), pending.touched(triton_sass.parse(listing))
    multiplies = _multiplies(kernel.asm["ttir"], named.name)
    return Report(
        module=job.kernel[0].rpartition(".")[2],
        name=named.name,
        capability=capability,
        warps=job.options["num_warps"],
        stages=job.options["num_stages"],
        registers=registers,
        stack=stack,
        shared=kernel.metadata.shared,
        instructions=instructions,
        wgmma=multiplies,
        bulk=any(kind.startswith("tensordesc") for kind in job.signature.values()),
        ahead=_ahead(kernel.asm["ttgir"]) if multiplies else None,
        tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
        ordered=re.search(r"tcgen05\.wait::[\w.]+;(?!\s*bar\.sync)", ptx) is None,
        warnings=serialised(log),
        code=code,
        touched=touched,
        aligned=named.aligned,
        shallow=_shallow_rings(kernel.asm["ttgir"]),
    )


def _multiplies(code: str, name: str) -> bool:
    """Whether it has products that tensor cores should take as the chip's own: those of float32 operands fit only
    where both lie along the rows that are summed over, as in plain linear layers."""
    kinds = set(re.findall(r"tt\.dot .* : tensor<[\dx]+x(\w+)> \*", code))
    return bool(kinds) and (
        "f32" not in kinds or re.match(r"(grouped_)?linear\w* fp32 (?!transposed)", name) is not None
    )


@functools.cache
def _digest_of_scan() -> str:
    return hashlib.sha256(
        b"".join(Path(file).read_bytes() for file in (triton_sass.__file__, pending.__file__, __file__))
    ).hexdigest()


def _ptxas_log(ptx: str, capability: int) -> str:
    """The log of ptxas for a kernel. Triton throws it away, so this is a second run, with Triton's options."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        architecture = f"--gpu-name={sm_arch_from_capability(capability)}"
        command = [get_ptxas(capability).path, "-lineinfo", "-v", architecture, file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def serialised(log: str) -> list[str]:
    """The warnings in a log of ptxas about products that could have run side by side: C7500 to C7599."""
    return [found[0].strip() for line in log.splitlines() if (found := re.search(r"\(C75\d\d\).*", line))]


def _ahead(code: str) -> int | None:
    """Asynchronous copies before the first innermost loop with a matrix product, in Triton's last GPU dialect.

    A compiler that finds no way to run copies ahead issues each where it waits for it, and reports nothing.
    """
    for before, body in _innermost_loops(code):
        if any(re.search(r"tt\.dot|warp_group_dot %|tc_gen5_mma", inside) for inside in body):
            return len(re.findall(r"async_(?:tma_)?copy_global_to_local", "\n".join(before)))
    return None


def _innermost_loops(code: str) -> Iterator[tuple[list[str], list[str]]]:
    """The lines before each, and its own."""
    lines = code.splitlines()
    for index, line in enumerate(lines):
        if "scf.for" in line:
            closing, rest = line[: len(line) - len(line.lstrip())] + "}", lines[index + 1 :]
            body = rest[: next((i for i, inside in enumerate(rest) if inside.startswith(closing)), None)]
            if not any("scf.for" in inside for inside in body):
                yield lines[:index], body


def _shallow_rings(code: str) -> list[str]:
    """Operands of a product on Hopper whose copies overwrite what it still reads, in Triton's last GPU dialect.

    A step starts a product, waits for that of the step before (one stays pending) and starts the copies of as many
    steps later as there were copies ahead of the loop: a ring of buffers needs one more than those.
    """
    found = []
    for before, body in _innermost_loops(code):
        rings = dict(re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", "\n".join(before)))
        views = dict(re.findall(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)", "\n".join([*before, *body])))

        def ring(name: str, views: dict[str, str] = views) -> str:
            while name in views:
                name = views[name]
            return name

        copies = re.findall(r"copy_global_to_local %\w+(?:\[[^]]*\]|,) (%\w+)", "\n".join(before))
        ahead = Counter(map(ring, copies))
        operands: list[str] = []
        for line in body:
            if product := re.search(r"warp_group_dot (%\w+), (%\w+), .*isAsync = true", line):
                operands = [ring(name) for name in product.groups()]
            elif wait := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
                for name in operands if int(wait[1]) else ():
                    if name in rings and int(rings[name]) <= ahead[name]:
                        found.append(f"{name[1:]}: {rings[name]} buffers, {ahead[name]} copies ahead")
                operands = []
    return found


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) per thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match, text
    return int(match[1]), int(match[2])
