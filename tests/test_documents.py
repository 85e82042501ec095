"""Code in the documents runs, its output is what they show, and their links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest
from planner_cases import cases

from tmojax.check import check
from tmojax.importers.machine_toml import preset_names
from tmojax.planners.registry import PLANNERS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def between(text: str, name: str) -> str:
    return text.split(f"<!-- {name}: begin -->\n", 1)[1].split(f"<!-- {name}: end -->", 1)[0]


def test_the_example_prints_what_the_readme_shows(capsys):
    """Words exactly; numbers within 5 %, since other versions of JAX and of the solver may differ a little."""
    (example,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in example.splitlines() if line and not line.startswith(("import", "from"))]) <= 10
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    shown = between((ROOT / "README.md").read_text(), "output of the example").strip().splitlines()[1:-1]
    assert [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in shown]
    ours, theirs = ([float(n) for n in NUMBER.findall("\n".join(lines))] for lines in (printed, shown))
    assert ours == pytest.approx(theirs, rel=0.05)


def test_the_planner_of_the_documentation_works(monkeypatch, tmp_path, capsys):
    definition, use = blocks(ROOT / "docs" / "adding-a-planner.md", "python")
    names: dict = {"__name__": "largest_first"}
    monkeypatch.setitem(PLANNERS, "largest-first", PLANNERS["keep-all"])  # so that the registry is restored
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    exec(compile(definition, "definition", "exec"), names)
    exec(compile(use, "use", "exec"), names)
    printed = capsys.readouterr().out
    assert "largest-first" in printed and Path(printed.splitlines()[-1]).is_dir()
    planner = names["LargestFirst"]()
    for problem in cases().values():
        result = planner.plan(problem)
        if result.schedule is not None:
            assert check(problem, result.schedule).valid
        else:
            assert "bytes" in result.message


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_every_document_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"({path.name})" in index, path.name


def test_every_planner_and_preset_is_documented():
    planners = (ROOT / "docs" / "choosing-a-planner.md").read_text()
    machines = (ROOT / "docs" / "machines.md").read_text()
    assert set(re.findall(r"^\| `([a-z0-9-]+)`", planners, re.MULTILINE)) - {"kind"} == PLANNERS.keys()
    for name in preset_names():
        assert f"| `{name}` |" in machines


def test_commands_of_the_readme_name_files_that_exist():
    for line in "".join(blocks(ROOT / "README.md", "sh")).splitlines():
        for word in shlex.split(line):
            assert "/" not in word or word.startswith(".venv/") or (ROOT / word).exists(), word
