"""What is installed: the wheel holds the package and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build writes beside setup.py, and others may build at a time
    shutil.copytree(ROOT / "memory_saving_gradients", source / "memory_saving_gradients")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, source]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_holds_only_the_package(wheel):
    ours = {name for name in wheel.namelist() if ".dist-info/" not in name}
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "memory_saving_gradients").rglob("*")
        if path.suffix in (".py", ".typed", ".html")
    }
    assert ours == there
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


def test_its_description(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    facts = Parser().parsestr(wheel.read(name).decode())
    assert facts.get_payload().startswith("# memory_saving_gradients")
    assert {"plot", "tensorboard", "test", "docs", "gpu", "demo"} <= set(
        facts.get_all("Provides-Extra")
    )
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert (
        "memory-saving-gradients = memory_saving_gradients.__main__:main"
        in wheel.read(name).decode()
    )


def test_the_version_is_that_of_the_change_log_and_the_citation(wheel):
    version = Path(wheel.filename).name.split("-")[1]
    assert f"## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
