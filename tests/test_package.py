"""What is distributed, built as pip builds it, and installed where there is nothing else, torch least of all."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import zbkern

ROOT = Path(__file__).parents[1]
ELSEWHERE = shutil.ignore_patterns(".*", "build", "dist", "demo", "tests", "*.egg-info", "*.so", "__pycache__")

pytestmark = pytest.mark.slow


def build(kind: str, source: Path, out: Path) -> Path:
    """A source distribution or a wheel by the project's build backend, with nothing compiled."""
    code = f"from build_tools import backend; print(backend.build_{kind}({str(out)!r}))"
    environment = {**os.environ, "ZBKERN_BUILD": "off", "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "checkout", ignore=ELSEWHERE)
    with tarfile.open(build("sdist", folder / "checkout", folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_a_source_distribution_has_what_its_pages_link_to(source: Path) -> None:
    for page in [source / "README.md", source / "CHANGELOG.md", *source.glob("docs/*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?![a-z]+:)([^)\s#]+)", text):
            path = (page.parent / target).resolve().relative_to(source.resolve())
            assert (source / path).exists() or path.parts[0] in ("tests", "bench"), target
    assert len([*source.glob("docs/*.md")]) == len([*ROOT.glob("docs/*.md")])


def test_the_description_reads_well_elsewhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    text = metadata.get_payload()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert re.findall(r"\]\((?![a-z]+:)[^)]*\)", text) == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"```.*?```", text, re.DOTALL) == re.findall(r"```.*?```", readme, re.DOTALL)


def test_an_empty_environment_plans_and_says_what_brings_torch(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    binaries = tmp_path / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(binaries / "python"), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True)

    def run(*command: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(binaries / command[0]), *command[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    assert run("zbkern", "--version") == f"zbkern {zbkern.__version__}\n"
    assert "torch           not installed: pip install torch" in run("zbkern", "info")
    plan = ["zbkern", "plan", "--stages", "4", "--microbatches", "8"]
    assert "zbkern was installed without a C++ compiler: install one, then zbkern again, or name" in run(*plan)
    assert "interleaved_zero_bubble" in run(*plan, "--schedule", "zb_h1", "--compare")
    costs = run("zbkern", "plan", "--stages", "2", "--microbatches", "4", "--schedule", "zb_v", "--out", "picture.html")
    assert "wrote picture.html" in costs
    assert "needs torch 2.8 or later: pip install torch" in run("python", "-c", "import zbkern; zbkern.convert")
    page = "resources.files('zbkern.planning.command').joinpath('play.html').is_file()"
    assert run("python", "-c", f"from importlib import resources; print({page})") == "True\n"
