"""What of the CUDA extension can be held to account without a GPU: its host side, its machine code, its refusals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from build_tools import cuda as build
from build_tools.kernels import pending, sass
from zbkern.kernels.cuda import wgrad as cuda_wgrad

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="would launch on the GPU that is here")


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    if cuda_wgrad._cuda is None:
        pytest.skip("the CUDA kernels are not built here: make cuda")
    if build.sources_hash() != cuda_wgrad._cuda.SOURCES_HASH:
        pytest.skip("the CUDA kernels that are built are not those of csrc/: make cuda")
    return cuda_wgrad._cuda


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("built", [None, SimpleNamespace(CUDA_VERSION=13000)])
def test_another_gpu_is_refused(capability: tuple[int, int], built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is built: nobody builds what cannot run."""
    monkeypatch.setattr(cuda_wgrad, "_cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cuda_wgrad.why_not().endswith("9.0 and this GPU has {}.{}".format(*capability))


@pytest.mark.parametrize("torch_cuda", ["12.8", None])
def test_a_build_for_another_major_version_of_cuda_is_refused(torch_cuda: str | None) -> None:
    assert "were built with CUDA 13.0" in cuda_wgrad.unfit(torch_cuda, 13000)
    assert cuda_wgrad.unfit("13.2", 13000) is None


def test_why_it_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert cuda_wgrad.why_not() is not None
    monkeypatch.setattr(cuda_wgrad, "_cuda", None)
    assert "ZBKERN_BUILD=cuda" in cuda_wgrad.why_not()


def test_module_tells_what_it_was_built_with(extension: ModuleType) -> None:
    assert extension.CUDA_VERSION >= 12000
    assert re.fullmatch(r"4\.2\.\d+", extension.CUTLASS_VERSION)


@pytest.mark.parametrize("sms", [2, 32, 132])
@pytest.mark.parametrize("n", [8, 128, 136, 4096, 11008])
@pytest.mark.parametrize("k", [8, 256, 264, 4096])
def test_tiles_and_blocks(extension: ModuleType, n: int, k: int, sms: int) -> None:
    tile = extension.choose_tile(n, k, 4096, sms)
    assert tile in (128, 256)
    tiles = extension.count_tiles(n, k, tile)
    assert tiles * 128 * tile >= n * k
    assert tiles <= (-(-n // 128) + 1) * -(-k // tile)
    blocks = extension.choose_blocks(tiles, sms, 0)
    assert blocks % 2 == 0
    assert 2 <= blocks <= max(2, sms)
    for most in (1, 3, 4):
        bounded = extension.choose_blocks(tiles, sms, most)
        assert bounded % 2 == 0
        assert bounded >= blocks
        assert -(-tiles // bounded) <= most


def test_a_wide_tile_is_chosen_for_many_tiles_and_tokens_and_a_narrow_one_for_few(extension: ModuleType) -> None:
    for n, tokens, tile in ((8192, 8192, 256), (4096, 16384, 256), (4096, 2048, 128), (1024, 8192, 128)):
        assert extension.choose_tile(n, n, tokens, 132) == tile


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([8, 16]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_tile_is_computed_once_and_in_bands(extension: ModuleType, rows: int, columns: int, band: int) -> None:
    places = [extension.tile_place(index, rows, columns, band) for index in range(rows * columns)]
    assert sorted(places) == [(row, column) for row in range(rows) for column in range(columns)]
    assert [row // band for row, _ in places] == sorted(row // band for row, _ in places)
    for before, after in pairwise(places):  # down, then right, then to the next band
        assert after[0] == before[0] + 1 or after[1] == before[1] + 1 or after == (before[0] // band * band + band, 0)


# what wgrad takes; a test changes one thing
def product(extension: ModuleType, **change: object) -> tuple[list[tuple], list[int]]:
    values = {"dweight": 1024, "n": 64, "k": 64, "stride": 64, "x": 2048, "dy": 4096, "rows": 32, "count": 1} | change
    segment = (values["x"], values["dy"], values["rows"], values["k"], values["n"])
    item = (values["dweight"], 0, values["n"], values["k"], values["stride"], [segment] * values["count"])
    return [item] * change.get("products", 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 60}, "multiples of 8"),
        ({"n": 0}, r"multiples of 8; got \[0, 64\]"),
        ({"x": 2056}, "x must begin"),
        ({"dy": 4098}, "dy must begin"),
        ({"stride": 65}, "dweight must begin"),
        ({"rows": 0}, "must have rows"),
        ({"count": 0}, "needs a segment"),
        ({"count": 17}, "at most 16 segments"),
        ({"products": 5}, "1 to 4 weights"),
        ({"products": 0}, "1 to 4 weights"),
        ({"tile": 64}, "128 or 256 columns"),
    ],
)
def test_wgrad_refuses_what_it_cannot_run(extension: ModuleType, change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        extension.wgrad(product(extension, **change), 1, 0, 0, True, 132, 0, 0, 0, tile_k=change.get("tile", 0))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [(1, 0, "bfloat16 or float16"), (1, 3, "a dtype is 0"), (2, 2, "dweight must be"), (3, 2, "dbias must be")],
)
def test_wgrad_refuses_dtypes(extension: ModuleType, place: int, value: int, words: str) -> None:
    arguments = [product(extension), 1, 0, 0, True, 132, 0, 0, 0]
    arguments[place] = value
    with pytest.raises(ValueError, match=words):
        extension.wgrad(*arguments)


@needs_no_gpu
def test_a_launch_without_a_gpu_is_an_error_not_a_crash(extension: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="zbkern: asking for the device"):
        extension.wgrad(product(extension), 1, 0, 0, True, 0, 0, 0, 0)


# ---- the machine code ----


@pytest.fixture(scope="module")
def report(extension: ModuleType) -> str:
    text = build.REPORT.read_text() if build.REPORT.exists() else ""
    if not text.startswith(extension.SOURCES_HASH):
        pytest.skip(f"the compiler's report of this build is not in {build.REPORT}")
    return text


def test_no_kernel_spills_and_wgmma_is_not_serialised(report: str) -> None:
    found = re.findall(
        r"Compiling entry function '(\S+)' for '(\S+)'.*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        report,
        re.DOTALL,
    )
    assert len(found) == 8
    for kernel, target, *numbers in found:
        stack, stores, loads, registers = map(int, numbers)
        assert (stack, stores, loads) == (0, 0, 0), (kernel, target)
        assert target == "sm_90a"
        assert registers == 168, kernel  # 65536 / 384 threads; setmaxnreg hands them out anew
    assert "serializ" not in report  # ptxas says so when it makes wgmma wait
    assert "warning" not in report


def disassembler() -> str | None:
    """cuobjdump of PATH, of its package, Triton's, or the toolkit's; it needs nvdisasm beside it."""
    packages = Path(sysconfig.get_paths()["purelib"])
    places = [*packages.glob("nvidia/cu*/bin"), packages / "triton/backends/nvidia/bin", Path("/usr/local/cuda/bin")]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *map(str, places)]))


def machine_code(extension: ModuleType) -> dict[str, str]:
    """Instructions of every kernel."""
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump; it comes with CUDA's toolkit and with triton")
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(tool).parent), os.environ["PATH"]])}
    command = [tool, "-sass", "-arch", "sm_90a", extension.__file__]
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"Function : (\S+)(.*?)(?=Function :|\Z)", text, re.DOTALL))


@pytest.fixture(scope="module")
def kernels(extension: ModuleType) -> dict[str, str]:
    return machine_code(extension)


def test_hopper_code_uses_wgmma_and_tma(kernels: dict[str, str]) -> None:
    assert len(kernels) == 8  # two input types, two output types, two tiles
    for name, body in kernels.items():
        tile, kind = "256" if "Li256E" in name else "128", r"\.BF16" if "bfloat16" in name else ""
        assert re.search(rf"HGMMA\.64x{tile}x16\.F32{kind}\b", body), name
        assert re.search(rf"HGMMA\.64x8x16\.F32{kind}\b", body), name  # the bias
        assert re.search(r"UTMALDG\.\dD\.MULTICAST", body), name  # x, shared by the blocks of a cluster
        assert "UTMASTG" in body, name
        assert "USETMAXREG" in body, name
        assert not re.search(r"\b(STL|LDL)\b", body), name


def listings(extension: ModuleType, folder: Path) -> dict[str, str]:
    """nvdisasm's, which has labels, of every kernel."""
    tool = disassembler()
    if tool is None or sass.disassembler() is None:
        pytest.skip("no cuobjdump or no nvdisasm; they come with CUDA's toolkit and with triton")
    command = [tool, "-xelf", "all", "-arch", "sm_90a", extension.__file__]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    text = "".join(sass.disassemble(file.read_bytes()) for file in sorted(folder.glob("*.cubin")))
    return dict(re.findall(r"^//-+ \.text\.(\S+).*?$(.*?)(?=^//-+ \.|\Z)", text, re.DOTALL | re.MULTILINE))


@pytest.mark.slow
def test_no_instruction_touches_a_product_under_way(extension: ModuleType, tmp_path: Path) -> None:
    """As the report of Triton's kernels asks of theirs; and products are not waited for one by one."""
    found = listings(extension, tmp_path)
    assert len(found) == 8
    for name, listing in found.items():
        code, scanned = sass.parse(listing), sass.scan(listing)
        assert code.labels, name
        assert scanned.products >= 12, name
        assert scanned.alone <= scanned.products // 4, name
        assert not pending.touched(code), name
