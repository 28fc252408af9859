"""README, the documentation and its examples, as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memory_saving_gradients as msg
from scripts.home_page import home_page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


BARE = [str(ROOT / "tests" / "bare.py")]
#: What the pages' code needs beside the package.
WITH_EXTRAS = {"reports.md"}  # the extra `plot`
WITHOUT_PLANS = {"choosing.md", "by-hand.md"}  # that print none


def run(script, folder, command):
    settings = {k: v for k, v in os.environ.items() if k != "TF_ENABLE_ONEDNN_OPTS"}
    ran = subprocess.run(
        [*command, str(script)], env=settings, cwd=folder, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "UserWarning" not in ran.stderr
    return ran.stdout


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if python_blocks(text)])
@pytest.mark.measured
def test_the_code_of_a_page_runs(name, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(python_blocks(PAGES[name])))
    said = run(script, tmp_path, [sys.executable, *([] if name in WITH_EXTRAS else BARE)])
    assert "predicted peak" in said or name in WITHOUT_PLANS


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
@pytest.mark.sweep(3)
@pytest.mark.measured
def test_an_example_runs_and_saves(path, tmp_path):
    said = run(path, tmp_path, [sys.executable, *BARE])
    ratio = re.search(r"predicted peak .* \((\d+\.\d+)x\)", said)
    assert float(ratio[1]) > 1.5
    if "measured peak" in said:
        predicted = float(re.search(r"-> ([\d.]+) MB", said)[1])
        measured = float(re.search(r"measured peak ([\d.]+) MB", said)[1])
        plain = float(re.search(r"predicted peak ([\d.]+) MB", said)[1])
        assert measured < (predicted + plain) / 2


def test_every_example_is_shown_and_named():
    for path in EXAMPLES:
        assert f"docs/examples/{path.name}" in README
        assert f'--8<-- "docs/examples/{path.name}"' in PAGES["examples.md"]


@pytest.mark.measured
def test_the_code_of_readme_runs_as_pasted(tmp_path):
    script = tmp_path / "pasted.py"
    script.write_text("\n".join(python_blocks(README)))
    said = run(script, tmp_path, [sys.executable, *BARE])
    assert "measured peak" in said  # of `fit`
    # The tape, `gradients` and the patch.
    savings = re.findall(r"predicted peak [\d.]+ \w?B -> .*? \((\d+\.\d+)x\)", said)
    assert len(savings) >= 4
    assert all(float(ratio) > 1.5 for ratio in savings)


@pytest.mark.slow
def test_the_wheel_runs_in_a_fresh_environment(tmp_path):
    """README's first example, in a real environment with nothing but the wheel, made by pip."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "build", "-w", "-o", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
    script = tmp_path / "example.py"
    script.write_text(python_blocks(README)[0])
    assert "measured peak" in run(script, tmp_path, [python])
    command = str(tmp_path / "venv" / "bin" / "memory-saving-gradients")
    ran = subprocess.run([command, "max-batch", "--help"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "command",
    sorted(
        set(re.findall(r"\bscripts/\w+(?:/\w+)?(?:\.py)?\b(?!/)", README + "".join(PAGES.values())))
    ),
)
def test_commands_are_there_and_can_be_run(command):
    path = ROOT / command
    assert path.is_dir() or command.endswith(".py") or os.access(path, os.X_OK)
    assert path.exists()


LINKS = [
    (name, target)
    for name, text in {"README.md": README, **{f"docs/{n}": t for n, t in PAGES.items()}}.items()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
]


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_links_and_figures_lead_somewhere(page, target):
    assert (ROOT / page).parent.joinpath(target).is_file()


def test_the_reference_has_every_public_name():
    shown = re.findall(r"::: memory_saving_gradients\.([\w.]+)", PAGES["reference.md"])
    public = {*msg.__all__} - {"keras"} | {f"keras.{name}" for name in msg.keras.__all__}
    assert public | {"measure"} == {*shown}


def test_readme_is_one_page():
    assert len(README.splitlines()) <= 132


def test_options_of_the_command_line_are_those_of_the_documents():
    from memory_saving_gradients.__main__ import _parser

    text = README + PAGES["reports.md"]
    for line in re.findall(r"^memory-saving-gradients (?!--help)(.+)$", text, re.MULTILINE):
        assert _parser().parse_args(line.split()).command == line.split()[0]


def test_readme_is_the_home_page():
    assert re.sub(r"\]\([^)]*\)", "", home_page()) == re.sub(r"\]\([^)]*\)", "", README)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", home_page()):
        assert (ROOT / "docs" / target).is_file()


#: The column of text between both sidebars, and a character of a table in it, in pixels.
COLUMN, CHARACTER, PADDING = 688, 7.2, 16


def tables(text):
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [re.split(r"(?<!\\)\|", line.strip("|\n")) for line in one.splitlines()] for one in found
    ]


@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, rows) for name, text in {"README": README, **PAGES}.items() for rows in tables(text)],
)
def test_tables_fit_the_column(name, rows):
    """By the longest word of each column; code may break anywhere."""
    widths = 0.0
    for cells in zip(*rows, strict=True):
        words = [word for cell in cells for word in re.sub(r"`[^`]*`", "", cell).split()]
        widths += CHARACTER * max(map(len, words), default=1) + PADDING
    assert widths <= COLUMN
