"""The documentation's commands, run in order as a reader would type them, and what is said to come out of them.

A block marked ```sh is run; one marked ```sh slow only by `make test-all`. One marked ```python NAME becomes the file NAME
(```python DIR/NAME shows a file that is there).
A block marked ```text right after commands is what they print: the same words, line for line, but not the same numbers,
and without samples/s at the end of a line;
`...` alone on a line stands for any lines.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.launchers import ROOT, launch

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\S*) ?(\S*)\n(.*?)^```\n", re.M | re.S)
OF_THIS_MACHINE = re.compile(r"automatic: |\d+ ranks? on ")  # cores, MPI, GPUs


class Block(NamedTuple):
    commands: str
    slow: bool
    output: str | None  # None: not shown


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    end = -1  # of the block before, if that was one of commands
    for match in FENCE.finditer(text):
        language, mark, inside = match.groups()
        if language == "sh":
            found.append(Block(inside, mark == "slow", None))
        elif language == "python" and mark and "/" not in mark:  # a file of that name
            found.append(Block(f"cat > {mark} << 'END_OF_FILE'\n{inside}END_OF_FILE\n", False, None))
        elif language == "text" and end >= 0 and not text[end : match.start()].strip():
            found[-1] = found[-1]._replace(output=inside)
        end = match.end() if language == "sh" else -1
    return found


def words(output: str) -> list[str]:
    """Return the lines with numbers and hashes taken out, without those that depend on the machine."""
    lines = [line.strip() for line in output.replace("[1,0]<stdout>:", "").splitlines()]
    lines = [re.sub(r"  [\d,]+ samples/s$", "", line) for line in lines if line and not OF_THIS_MACHINE.match(line)]
    return [re.sub(r"\b[0-9a-f]{64}\b|\d[\d,.]*", "#", line) for line in lines]


def as_shown(printed: str, shown: str) -> bool:
    pattern = "".join(r"(.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in words(shown))
    return re.fullmatch(pattern, "".join(line + "\n" for line in words(printed))) is not None


def run(blocks: list[Block], directory: Path) -> None:
    for name in ("hvdtrain", "launch", "tests", "docs", "pyproject.toml", "Makefile"):
        (directory / name).symlink_to(ROOT / name)
    for block in blocks:
        # The pages had no GPU; and torchrun's own port may be another job's here.
        alone = dict(CUDA_VISIBLE_DEVICES="", PET_STANDALONE="1")
        done = launch(f"bash -euc {shlex.quote(block.commands)}", cwd=directory, timeout=600, **alone)
        assert done.code == 0, f"{block.commands}\n{done}"
        if block.output is not None:
            assert as_shown(done.stdout, block.output), f"{block.commands}\nshown:\n{block.output}\n{done}"


def pages(*, slow: bool) -> list[Path]:
    return [page for page in PAGES if any(block.slow == slow for block in blocks(page.read_text()))]


@pytest.mark.parametrize("page", pages(slow=False), ids=lambda path: path.name)
def test_quick_commands(page, tmp_path):
    run([block for block in blocks(page.read_text()) if not block.slow], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", pages(slow=True), ids=lambda path: path.name)
def test_every_command_in_order(page, tmp_path):
    run(blocks(page.read_text()), tmp_path)


def test_output_is_compared_by_words():
    assert as_shown("loss 0.1\nstep 3 of 9\n", "loss 0.2\nstep 4 of 9\n")
    assert as_shown("one\ntwo\nthree\n", "one\n...\nthree\n")
    assert not as_shown("loss 0.1\n", "loss 0.1\nlast line\n")
    assert not as_shown("gain 0.1\n", "loss 0.1\n")
    assert not as_shown("two hashes\ntwo hashes\n", "two hashes\n")
