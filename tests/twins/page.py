"""The table of the twins as a page: docs/evidence/twins.md."""

import time
from collections import Counter

import torch

from tests.e2e.launchers import ROOT
from tests.twins.twin import SKIPPED, Verdict

Verdicts = dict[str, Verdict]  # by the name of the twin
PAGE = ROOT / "docs" / "evidence" / "twins.md"
HEAD = """# What of torch works, differs, is refused

| | |
|---|---|
| Claim | of {all} programs, {works} train as in plain PyTorch, {differs} differ as said, {refused} are refused. {silent} |
| Command | `python -m tests.twins` |
| Machine | virtual machine with two cores, no GPU, PyTorch {torch} |
| Runs, spread | once with each engine and number of ranks that the table names, and once more killed and resumed |
| Date | {date} |

The command walks torch's namespaces, and makes a program of each layer, loss, optimizer, scheduler, sampler and so on.
Each is trained by hvdtrain and by a plain loop. `--list` prints all, and why some have no program.

**works**: losses, weights, samples and the evaluation are those of the plain loop with the global batch, up to rounding.
All ranks have the same bits, and so has a run that is killed and resumed. Losses, layers without weights and programs with
DataLoader workers are not resumed here.

**differs**: a plain loop with the global batch cannot give the same numbers. The rest is compared as above. Where the loss
of a sample depends on the others of its batch, the plain loop sums up the gradients of the ranks' parts
([why](../how-it-works.md#the-gradient)).

**refused**: exit code 2 and one line, which the table quotes. It counts here if one way refuses it.

| ranks and engine | works | differs | refused | fails in one line | another value | traceback | hangs |
|---|---:|---:|---:|---:|---:|---:|---:|
"""
MOST_NAMED = 10  # names of a kind that are listed
KINDS = ["works", "differs", "refused", "failed", "WRONG", "TRACEBACK", "HANGS"]


def page(table: dict[str, Verdicts]) -> str:
    """Return the page of these verdicts, by way and name."""
    names = [name for name in next(iter(table.values())) if all(name in verdicts for verdicts in table.values())]
    by_name = {name: {way: table[way][name] for way in table} for name in names}
    kinds = {name: worst(list(verdicts.values())).kind for name, verdicts in by_name.items()}
    tried = [name for name in names if kinds[name] != "torch"]
    total = Counter(kinds[name] for name in tried)
    rest = len(tried) - sum(total[kind] for kind in ("works", "differs", "refused"))
    text = HEAD.format(
        works=total["works"], all=len(tried), differs=total["differs"], refused=total["refused"],
        silent=f"{rest} are wrong" if rest else "None is wrong in silence, hangs or ends in a traceback",
        torch=torch.__version__.partition("+")[0], date=time.strftime("%Y-%m-%d"),
    )  # fmt: skip
    for way in table:
        of = Counter(table[way][name].kind for name in tried)
        of["HANGS"] += of["DIES"]
        text += f"| {way[-1]}, {way[:-1]} | {' | '.join(str(of[kind]) for kind in KINDS)} |\n"
    families = dict.fromkeys(family(name) for name in tried)
    text += "\n## Refused, or otherwise than in the plain loop\n\n| programs | where | what |\n|---|---|---|\n"
    rows: dict[tuple[str, str], list[str]] = {}
    for name in tried:
        if kinds[name] not in ("works", "differs"):
            ways: dict[str, list[str]] = {}
            for way, verdict in by_name[name].items():
                if verdict.kind not in ("works", "differs"):
                    said = verdict.detail if verdict.kind == "refused" else f"{verdict.kind}: {verdict.detail}"
                    said = said.removeprefix("rank 0: ")
                    dtype = name.rpartition(".")[2]  # a row for all of them
                    ways.setdefault(said.replace(f" is {dtype}, ", " is ..., "), []).append(way)
            for said, where in ways.items():
                rows.setdefault((said, "everywhere" if len(where) == len(table) else ", ".join(where)), []).append(name)
    text += "".join(f"| {cell('; '.join(of))} | {where} | {cell(said)} |\n" for (said, where), of in rows.items())
    text += "\n## Differs\n\n| why | programs |\n|---|---|\n"
    differs = {name: worst(list(by_name[name].values())).detail for name in tried if kinds[name] == "differs"}
    for why in dict.fromkeys(differs.values()):
        of_why = [name for name in differs if differs[name] == why]
        shown = (f"{each.rstrip(',:')}: {'; '.join(part(name, each) for name in of_why if family(name) == each)}"
                 for each in dict.fromkeys(map(family, of_why)))  # fmt: skip
        text += f"| {why} | {cell(' / '.join(shown))} |\n"
    text += "\n## Works\n\nBy kind, and how many do. A name stands for its variants, such as `foreach=True`. "
    text += f"Of more than {MOST_NAMED} names, none is listed: it is each that is not above.\n\n"
    for each in families:
        of_kind = [name for name in tried if family(name) == each]
        works = [part(name, each) for name in of_kind if kinds[name] == "works"]
        shown = list(dict.fromkeys(name.partition(",")[0] for name in works if name))
        listed = f": {cell(', '.join(shown))}" if 0 < len(shown) <= MOST_NAMED else ""
        text += f"- {each.rstrip(',:')}, {len(works)} of {len(of_kind)}{listed}\n"
    skipped = Counter(family(name) for name in (*SKIPPED, *(name for name in names if kinds[name] == "torch")))
    text += f"\nPlain PyTorch refuses {skipped.total()} more on a CPU, or no arguments were found: "
    return f"{text}{', '.join(f'{each} {count}' for each, count in skipped.items())}.\n"


def part(name: str, family: str) -> str:
    return name.removeprefix(family).strip()


def family(name: str) -> str:
    words = name.split(" ")
    of_two = words[1:2] in (["hook"], ["sampler"], ["items:"])
    return " ".join(words[: 3 if words[0] == "global" else 2 if of_two else 1])


def cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|").replace("\n", " ") if text else ""


def worst(verdicts: list[Verdict]) -> Verdict:
    order = ["works", "differs", "torch", "refused", "failed", "DIES", "HANGS", "TRACEBACK", "WRONG"]
    return max(verdicts, key=lambda verdict: order.index(verdict.kind))
