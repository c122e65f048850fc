"""Check that the pages for users read well: python docs/site/readability.py [FILE...]. `make docs` fails if one does not.

Without files: every page of the site, and the number of words in the pages for users, README.md and docs/*.md. Code does not
count: blocks are left out, code spans are a word.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 25  # words of a sentence
IN_ALL, README = 15_000, (400, 600)  # words
PARTS = ("evidence", "reference")  # of docs
FILE_NAME = re.compile(r"\[([\w./-]+\.md)\]\(")  # as the text of a link
# Words of our own, and the field's.
BANNED = {
    r"as it comes|as they come": "default",
    r"attack(?:s|ed|ing)?": "injected fault",
    r"sittings?": "session",
    r"undisturbed": "uninterrupted",
    r"asked for": "target, or leave it out",
    r"(?:the|our|its) aims?|aim(?:s|ed)? (?:at|for)": "target, or leave it out",
    r"(?<!standard )deviations?": "standard deviation",
    r"(?<!learning )(?<!sampling )(?<!sample )(?<!frame )(?<!clock )rates?(?! of)": "learning rate",
    r"input workers?": "DataLoader worker",
    r"meetings?": "rendezvous",
    r"go(?:es|ing)? on|went on": "resume, continue",
    r"(?:of|than|to|with) (?:one )?(?:apart|alone)": "ranks that never communicate, one rank",
}
# What is measured, not chosen: a share, a ratio, a throughput, how long something took.
NUMBER = r"\d[\d,.]*"
FIGURE = re.compile(
    rf"{NUMBER} ?%|{NUMBER} times (?:as|faster|slower|more|less|longer)|{NUMBER} (?:samples|images|tokens|windows)/s"
    rf"|{NUMBER} ms\b|\b(?:took|takes|needs|needed|in|within|about) {NUMBER} (?:s|seconds|minutes|GB|GiB|MB)\b"
)
COMMAND = re.compile(
    r"\b(?:python|make|horovodrun|mpirun|torchrun|srun|sbatch|podman|apptainer|pip|git) |launch/|\]\([^)]*evidence/"
)


def sections(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of each section, from its heading on."""
    start, lines, fence = 1, list[str](), False
    for number, line in enumerate(text.splitlines(), 1):
        fence ^= line.lstrip().startswith("```")
        if not fence and re.match(r"#+ ", line) and lines:
            yield start, "\n".join(lines)
            start, lines = number, []
        lines.append(line)
    yield start, "\n".join(lines)


def chunks(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each paragraph, list item, table cell and heading, without code and addresses."""
    text = re.sub(r"^ *```.*?^ *```", lambda code: "\n" * code[0].count("\n"), text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", lambda said: "\n" * said[0].count("\n"), text, flags=re.S)
    text = re.sub(r"``.+?``", "Code", text)
    text = re.sub(r"`[^`\n]*(?:\n[^`\n]+)?`", lambda code: "Code" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    start, lines, after_blank, in_item = 0, list[str](), True, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        item = re.match(r" *(?:[-*]|\d+\.) ", line)
        code = after_blank and not in_item and line.startswith("    ")
        alone = line.startswith(("|", "#")) or not line.strip() or code
        if (alone or item) and lines:
            yield start, " ".join(lines)
            lines = []
        if line.startswith("|"):
            yield from ((number, cell.strip()) for cell in line.strip("| ").split("|") if re.search(r"\w", cell))
        elif line.startswith("#"):
            yield number, line.lstrip("# ")
        elif not alone:
            start = start if lines else number
            lines.append(line[item.end() :] if item else line.strip())
        in_item = bool(item) or (in_item and (line.startswith(" ") or not line.strip()))
        after_blank = alone


def sentences(chunk: str) -> list[str]:
    """Split at a full stop, a question mark or an exclamation mark before a capital, and at a colon before a sentence."""
    plain = chunk.replace("**", "").replace("*", "")
    return [said for said in re.split(r"(?<=[.!?])[)\"]* +(?=[\"(]?[A-Z0-9])|(?<=:) +(?=[A-Z])", plain) if said.strip()]


def words(text: str) -> int:
    return len(re.findall(r"\S*\w\S*", text))


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line's number and what is wrong there."""
    for number, chunk in chunks(text):
        for said in sentences(chunk):
            if words(said) > LONGEST:
                yield number, f"{words(said)} words in a sentence, more than {LONGEST}: {said}"
        for banned, instead in BANNED.items():
            if match := re.search(rf"\b(?:{banned})\b", chunk, re.I):
                yield number, f"{match[0]!r}: {instead}"
    for match in FILE_NAME.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, f"{match[1]!r} as a link's text: say what is there"
    for start, section in sections(text):
        if not COMMAND.search(section):
            for number, chunk in chunks(section):
                if match := FIGURE.search(chunk):
                    yield (
                        start + number - 1,
                        f"{match[0]!r} without its command or a link to docs/evidence in its section",
                    )


def text_of(page: Path) -> str:
    """Return the Markdown of a page, or that of a notebook's cells."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def check(pages: list[Path]) -> list[str]:
    return [
        f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}:{number}: {what}"
        for page in pages
        for number, what in sorted(problems(text_of(page)))
    ]


def lengths(counted: dict[str, int]) -> list[str]:
    """Return what is wrong with the number of words of each page, by its name."""
    found, in_all = [], sum(counted.values())
    if not README[0] <= counted["README.md"] <= README[1]:
        found.append(f"README.md: {counted['README.md']:,} words, not {README[0]} to {README[1]}")
    if in_all > IN_ALL:
        most = sorted(counted, key=lambda name: -counted[name])[:5]
        found.append(f"{in_all:,} words on the pages for users, more than {IN_ALL:,}; most are on {', '.join(most)}")
    return found


def main() -> int:
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    found = check(pages or all_pages())
    if not pages:
        found += lengths(
            {page.name: sum(words(chunk) for _, chunk in chunks(page.read_text())) for page in user_pages()}
        )
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


def all_pages() -> list[Path]:
    others = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "containers" / "README.md"]
    others += sorted((ROOT / "docs").glob("*.ipynb"))
    return [*user_pages(), *others, *(page for part in PARTS for page in sorted((ROOT / "docs" / part).glob("*.md")))]


def user_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    sys.exit(main())
