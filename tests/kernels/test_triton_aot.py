"""What calls of the Triton kernels launch, compiled for GPUs that need not be here."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from build_tools.kernels import aot as triton_aot
from build_tools.kernels import jobs, launches
from build_tools.kernels.__main__ import main
from zbkern.kernels import tiles
from zbkern.kernels.tiles import SHARED_MEMORY

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ROOT = Path(__file__).parents[2]


def test_products_and_sums_are_joined_whatever_the_compiler_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    from zbkern.kernels.triton.common import compile_options

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # as it is from Triton 3.10 on
    parsed = make_backend(GPUTarget("cuda", 90, 32)).parse_options(compile_options(8, 3))
    assert (parsed.num_warps, parsed.num_stages, parsed.enable_fp_fusion) == (8, 3, True)


def test_each_chip_has_its_own_tiles_also_after_another() -> None:
    """Of dense and of grouped products: what was planned for one chip is forgotten before the next."""
    from zbkern.kernels.triton.matmul_tile import plan

    for capability in (*triton_aot.CAPABILITIES, *triton_aot.CAPABILITIES[::-1]):
        with launches.tiles_of(capability):
            for groups in (1, 8):
                arguments = ("wgrad", 4096, 4096, 4096)
                tile, _ = plan(*arguments, torch.bfloat16, torch.device("meta"), True, groups=groups)
                others = ((4096, 4096),) * (groups - 1)
                sms = launches.SMS[capability]
                assert tile == tiles.choose(*arguments, "bfloat16", capability, sms, True, others)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_no_kernel_of_large_layers_has_a_fault(capability: int) -> None:
    """No spills, shared and tensor memory within the chip's limits, its own instructions for products, and bulk copies
    where they are promised; on sm_90 no product waited for one by one. The tightest, compiled in this process; the code
    for sm_89 is that for sm_80, with casts to 8 bits as for sm_90."""
    found = list(triton_aot.reports(launches.jobs(capability, launches.tightest), jobs=1))
    faults = {report.name: report.faults() for report in found if report.faults()}
    assert not faults
    assert all(0 < report.registers <= 255 for report in found)
    everything = {name.rpartition(".")[2] for name in jobs.kernel_modules()}
    assert {report.module for report in found} == everything - ({"float8"} if capability < 89 else set())
    what_epilogues_read_is_called_to_l2(found)
    two_programs_of_a_norms_backward_fit_a_multiprocessor(found)


def what_epilogues_read_is_called_to_l2(found: list[triton_aot.Report]) -> None:
    """Nothing uses the result of that assembly, and no result depends on it."""
    pattern = r"linear .* gated dgrad|grouped_gated_dgrad|linear_wgrad .* 1 x \d.* add(?!: sum_rows)"
    wanted = [report for report in found if re.match(pattern, report.name)]
    assert len(wanted) == 8
    assert [report.name for report in wanted if not report.instructions["L2 prefetches"]] == []


def two_programs_of_a_norms_backward_fit_a_multiprocessor(found: list[triton_aot.Report]) -> None:
    """As many as `norm_partials` counts on: 65536 registers, handed to a thread in eights, and 1 KB that each program
    takes of the shared memory beside its own."""
    mine = [report for report in found if report.name.startswith("norm dgrad") and report.warps <= 8]
    assert len(mine) > 5
    for report in mine:
        assert 2 * 32 * report.warps * (-(-report.registers // 8) * 8) <= 65536, report
        assert 2 * (report.shared + 1024) <= 1024 * (SHARED_MEMORY[report.capability] + 1), report


@pytest.mark.slow
def test_what_was_found_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even where Triton's own cache is empty; a change of the scan makes it anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    found, compiled = [], []
    for turn in ("first", "second"):
        folder = tmp_path / turn
        folder.mkdir()
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        assert main(["--json", "--only", "attention tiles: ", "--capability", "90", "--jobs", "1"]) == 0
        found.append(capsys.readouterr().out)
        compiled.append(len(list(folder.glob("*/*.cubin"))))
    assert found[0].count('"faults": []') == compiled[0] == 2
    assert found[1] == found[0]
    assert compiled[1] == 0
    kept = list((tmp_path / "kept" / "zbkern" / "reports").iterdir())
    assert len(kept) == 2


def test_faults_are_found() -> None:
    for capability, product in {80: "mma", 90: "wgmma", 100: "tcgen05"}.items():
        none, some = {product: 0, "bulk copies": 0}, {product: 1, "bulk copies": 1}
        bad = triton_aot.Report("m", "n", capability, 8, 3, 255, 8, 300 * 1024, none, True, True, 2, 513, ordered=False)
        assert len(bad.faults()) == (7 if capability >= 90 else 6)  # before 9.0 there are no bulk copies to miss
        assert f"multiplies matrices without {product}" in bad.faults()
        assert not triton_aot.Report("m", "n", capability, 8, 3, 255, 0, 1024, some, True, True, 3, 512).faults()


@pytest.mark.parametrize(("ptx", "expected"), [("wgmma.mma_async", ["(C7515) serialised"]), ("mma.sync", [])])
def test_warnings_are_of_whatever_has_wgmma(monkeypatch: pytest.MonkeyPatch, ptx: str, expected: list[str]) -> None:
    """Not only of variants that must have it: float32 is multiplied by it where its tile allows."""
    target, options = SimpleNamespace(arch=90), {"num_warps": 4, "num_stages": 2}
    named = launches.Named("some fp32", jobs.CompileJob(("some.module", "_some"), {}, {}, {}, target, options), True)
    kernel = SimpleNamespace(
        asm={"cubin": b"", "ptx": ptx, "ttir": "", "ttgir": ""}, metadata=SimpleNamespace(shared=0)
    )
    for name, value in (
        ("compile_job", kernel), ("_resources", (32, 0)), ("_ptxas_log", "ptxas info : (C7515) serialised"),
    ):  # fmt: skip
        monkeypatch.setattr(triton_aot, name, lambda *_, value=value: value)
    monkeypatch.setattr(triton_aot.triton_sass, "disassembler", lambda: None)
    assert triton_aot._compile(named).warnings == expected


PRODUCT = (
    "%4 = tt.dot %1, %2, %3, inputPrecision = ieee : tensor<128x64x{0}> * tensor<64x256x{0}> -> tensor<128x256xf32>"
)


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("linear bf16 fwd", PRODUCT.format("bf16"), True),
        ("linear fp32 dgrad", PRODUCT.format("f32"), True),
        ("linear fp32 transposed gated dgrad gelu", PRODUCT.format("f32"), False),
        ("attention fp32 64: dq", PRODUCT.format("f32"), False),
        ("gate bf16", "%5 = tt.load %4", False),
    ],
)
def test_which_products_tensor_cores_should_take(name: str, code: str, expected: bool) -> None:
    assert triton_aot._multiplies(code, name) == expected


COPY, DOT = "%a = ttng.async_tma_copy_global_to_local", "%c = ttng.warp_group_dot %x, %y"


@pytest.mark.parametrize(
    ("before", "inside", "expected"),
    [
        ([COPY] * 4, [COPY, COPY, DOT], 4),
        ([], [COPY, COPY, "ttng.wait_barrier", DOT], 0),  # each where it is waited for
        (["scf.for %i {", "  %s = arith.addi", "}", *[COPY] * 2, DOT], [COPY, "%d = ttng.tc_gen5_mma"], 2),
        ([COPY, DOT], ["%s = arith.addi"], None),
        ([], [*[COPY] * 3, DOT, "scf.for %k {", "  " + DOT, "  " + COPY, "}"], 3),  # its first product is peeled off
    ],
)
def test_copies_ahead_are_counted(before: list[str], inside: list[str], expected: int | None) -> None:
    lines = [*before, "%r = scf.for %i = %zero to %n {", *["  " + line for line in inside], "}", COPY]
    assert triton_aot._ahead("\n".join("  " + line for line in lines)) == expected


RINGS = """\
%x = ttg.local_alloc : () -> !ttg.memdesc<{0}x64x128xbf16, #shared, #smem, mutable>
%y = ttg.local_alloc : () -> !ttg.memdesc<3x64x256xbf16, #shared, #smem, mutable>
%x_0 = ttg.memdesc_index %x[%c0] : !ttg.memdesc
ttng.async_tma_copy_global_to_local %a[%c0, %q] %x_0, %bar, %true : !tt.tensordesc
%y_0 = ttg.memdesc_index %y[%c0] : !ttg.memdesc
%t_0 = ttg.async_copy_global_to_local %b, %y_0 : tensor
%x_1 = ttg.memdesc_index %x[%c1] : !ttg.memdesc
ttng.async_tma_copy_global_to_local %a[%c64, %q] %x_1, %bar, %true : !tt.tensordesc
%y_1 = ttg.memdesc_index %y[%c1] : !ttg.memdesc
%t_1 = ttg.async_copy_global_to_local %b, %y_1 : tensor
%r = scf.for %i = %zero to %n {{
  %x_2 = ttg.memdesc_index %x[%i] : !ttg.memdesc
  %x_3 = ttg.memdesc_trans %x_2 {{order = array<i32: 1, 0>}} : !ttg.memdesc
  %y_2 = ttg.memdesc_index %y[%i] : !ttg.memdesc
  %d = ttng.warp_group_dot %x_3, %y_2, %sum {{isAsync = true}} : !ttg.memdesc
  %w:3 = ttng.warp_group_dot_wait %d, %x_3, %y_2 {{pendings = {1} : i32}} : tensor
}}"""


@pytest.mark.parametrize(("buffers", "pending", "faults"), [(2, 1, 1), (3, 1, 0), (2, 0, 0)])
def test_a_ring_that_a_pending_product_needs_one_more_buffer_of(buffers: int, pending: int, faults: int) -> None:
    found = triton_aot._shallow_rings(RINGS.format(buffers, pending))
    assert found == ["x: 2 buffers, 2 copies ahead"] * faults
    report = triton_aot.Report("m", "n", 90, 8, 3, 255, 0, 0, {"wgmma": 1}, True, False, shallow=found)
    assert len(report.faults()) == faults


def test_no_stride_is_kept_from_being_compiled_in() -> None:
    """An argument of an annotated type is never a constant on a GPU, not even a stride of 1: elements of rows would be
    loaded one by one."""
    found = []
    for path in (ROOT / "zbkern" / "kernels" / "triton").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list):
                arguments = [a for a in function.args.args if a.annotation is not None]
                found += [f"{path.name}: {a.arg}" for a in arguments if ast.unparse(a.annotation) != "tl.constexpr"]
    assert not found
