"""Run the quickstart and the README's example; write what they print into the README, and the plan's picture too."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONFIG = "configs/runs/quickstart.toml"
LAST_TABLE = "Memory at its fullest"  # the README shows what stands before it


def output(*command: str) -> str:
    """What a command prints; it is run in the root of the repository. Raises CalledProcessError."""
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def replace(text: str, name: str, printed: str) -> str:
    """`text` with `printed` between the marks of `name`."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, rest = text.split(begin, 1)
    return f"{head}{begin}```text\n{printed.rstrip()}\n```\n{end}{rest.split(end, 1)[1]}"


def main() -> None:
    printed = output(sys.executable, "-m", "tmojax.run", CONFIG)
    folder = ROOT / printed.splitlines()[-1]
    text = README.read_text()
    text = replace(text, "output of experiments/quickstart/run.sh", printed.split(LAST_TABLE)[0])
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    README.write_text(replace(text, "output of the example", output(sys.executable, "-c", example)))
    (ROOT / "docs" / "images").mkdir(exist_ok=True)
    shutil.copyfile(folder / "figures" / "plan.svg", ROOT / "docs" / "images" / "plan.svg")


if __name__ == "__main__":
    main()
