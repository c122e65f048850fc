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
| Claim | {works} of {all} small programs train as plain PyTorch does; engines and ranks: {names} |
| Command | `python -m tests.twins` |
| Machine | virtual machine with two cores, no GPU, PyTorch {torch} |
| Runs, spread | once with each engine and number of ranks; also killed and resumed, except with DataLoader workers |
| Date | {date} |

The command walks torch's namespaces, and makes a program of each layer, loss, optimizer, scheduler, sampler and so on.
Each is trained by hvdtrain and by a plain loop. A new version of torch is one run: new names are in the table by themselves.

**works**: within rounding, it has the losses and weights of the plain loop with the global batch. Samples are the same in
each epoch. The evaluation is that of the whole set. All ranks have the same bits, and so has a run that is killed and
resumed.

**differs**: a plain loop cannot give the same numbers. The program draws random numbers, or the loss of a sample depends on
the others of its batch, and each rank has its own ([why](../how-it-works.md#the-gradient)). Samples, evaluation, ranks and
the resumed run are compared as above. On one rank, only random numbers may differ.

**refused**: exit code 2 and one line, which the table quotes.

"""


def page(table: dict[str, Verdicts]) -> str:
    """Return the page of these verdicts, by way and name."""
    names = list(next(iter(table.values())))
    by_name = {name: {way: table[way][name] for way in table} for name in names}
    kinds = {name: worst(list(verdicts.values())).kind for name, verdicts in by_name.items()}
    tried = [name for name in names if kinds[name] != "torch"]
    text = HEAD.format(
        works=sum(kinds[name] == "works" for name in tried), all=len(tried), names=", ".join(table),
        torch=torch.__version__.partition("+")[0], date=time.strftime("%Y-%m-%d"),
    )  # fmt: skip
    text += "| kind | programs | works | differs | refused | otherwise |\n|---|---:|---:|---:|---:|---:|\n"
    families = dict.fromkeys(family(name) for name in tried)
    for each in families:
        of = Counter(kinds[name] for name in tried if family(name) == each)
        rest = sum(of.values()) - of["works"] - of["differs"] - of["refused"]
        text += f"| {each} | {sum(of.values())} | {of['works']} | {of['differs']} | {of['refused']} | {rest} |\n"
    text += "\n## Not as in the plain loop\n\n| program | where | what |\n|---|---|---|\n"
    for name in tried:
        if kinds[name] not in ("works", "differs"):
            for verdict in dict.fromkeys(v for v in by_name[name].values() if v.kind not in ("works", "differs")):
                where = [way for way in table if by_name[name][way] == verdict]
                everywhere = "everywhere" if len(where) == len(table) else ", ".join(where)
                text += f"| {name} | {everywhere} | {verdict.kind}: {cell(verdict.detail)} |\n"
    text += "\n## Differs\n\n| why | programs |\n|---|---|\n"
    differs = {name: worst(list(by_name[name].values())).detail for name in tried if kinds[name] == "differs"}
    for why in dict.fromkeys(differs.values()):
        text += f"| {why} | {cell('; '.join(name for name in differs if differs[name] == why))} |\n"
    text += "\n## Works\n\n| kind | programs |\n|---|---|\n"
    for each in families:
        works = [name.removeprefix(each).strip() for name in tried if family(name) == each and kinds[name] == "works"]
        text += f"| {each} | {cell('; '.join(works))} |\n" if works else ""
    text += "\n## Not tried\n\n| what | why |\n|---|---|\n"
    refused = {name: next(iter(by_name[name].values())).detail for name in names if kinds[name] == "torch"}
    for name, why in (SKIPPED | refused).items():
        text += f"| {name} | {cell(why)} |\n"
    return text


def family(name: str) -> str:
    words = name.split(" ")
    return " ".join(
        words[:3]
        if words[0] == "global"
        else words[:2]
        if words[1:2] in (["hook"], ["sampler"], ["items:"])
        else words[:1]
    )


def cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|").replace("\n", " ") if text else ""


def worst(verdicts: list[Verdict]) -> Verdict:
    order = ["works", "differs", "torch", "refused", "failed", "DIES", "HANGS", "TRACEBACK", "WRONG"]
    return max(verdicts, key=lambda verdict: order.index(verdict.kind))
