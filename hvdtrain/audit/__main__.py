"""The audit from its command line to its exit code: whole runs, kills, verdicts, a table."""

import json
import random
import re
import shlex
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from . import parse
from .runs import NotAudited, Program, Run, remove
from .verdicts import CAUSES, Verdict, Whole, compare_wholes, judge

HOURS = 3600.0
ELSEWHERE = "a second whole run went on from the first one: the program keeps its state elsewhere, not under {out}"
PLACES = {"step": "after step {number}", "within": "within step {number}", "evaluation": "in evaluation {number}",
          "file": "while a file is written after step {number}"}  # fmt: skip
HOW = {"one": "SIGKILL of rank {rank}", "all": "SIGKILL of all", "term": "SIGTERM to the launcher"}
Kills = list[dict[str, Any]]


def say(text: str) -> None:
    sys.stderr.write(f"audit: {text}\n")
    sys.stderr.flush()


def whole_runs(program: Program, options: Namespace) -> tuple[Whole, dict[str, str]]:
    """Run the program twice; return its metrics, too. Raises NotAudited if nothing could be said after that."""
    runs: list[Run] = []
    last: dict[str, str] = {}
    for name in ("whole", "again"):
        out = program.folder / "out" / name
        run = program.run(name, out, options.np, options.timeout or HOURS, whole=True)
        if run.code is None:
            raise NotAudited(f"the program has not ended after {run.seconds:.0f} s, without any kill: raise --timeout")
        if run.code:
            raise NotAudited(
                f"the program itself ends with {run.code}, without any kill: {run.last_line()} ({run.said})"
            )
        if not run.steps and runs:
            raise NotAudited(ELSEWHERE)
        if not run.steps:
            raise NotAudited(
                "no optimizer made a step that could be seen: the audit sees torch.optim in Python 3 that reads PYTHONPATH"
                f" ({run.said})"
            )
        if sorted(run.ranks) != list(range(options.np)):
            raise NotAudited(
                f"-np {options.np}, but the program trained as ranks {sorted(run.ranks)}: --launcher starts them"
            )
        runs.append(run)
        last = last or metrics(run, out, options.metric_regex)
        say(f"{name}: {run.steps} steps, {run.seconds:.1f} s")
        if not options.keep:
            remove(out)
    whole, again = runs
    if again.ranks[0].steps[0]["before"]["weights"] in {step["weights"] for step in whole.ranks[0].steps}:
        raise NotAudited(ELSEWHERE)
    return compare_wholes(whole, again), last


def draw(number: int, options: Namespace, whole: Whole) -> dict[str, Any]:
    """Return the place and the kind of a kill: kinds in turn, the place drawn after the first checkpoint."""
    draws = random.Random(f"{options.seed}-{number}")
    steps = whole.run.ranks[0].steps
    changed = [
        n for n in range(len(steps)) if steps[n]["file"] and steps[n]["file"] != (steps[n - 1]["file"] if n else [])
    ]
    earliest = min(changed[0] + 1 if changed else max(1, len(steps) // 5), max(1, len(steps) - 1))
    calls: dict[int, int] = {}
    for line in whole.run.ranks[0].evaluations:
        if line["after"] >= earliest:
            calls[line["phase"]] = line["call"] + 1
    places = ["step", "within", *(["evaluation"] if calls else []), *(["file"] if changed else [])]
    place = places[(number - 1) % len(places)]
    kinds = [how for how in options.signals if how != "all" or options.np > 1] or ["one"]
    how = kinds[(number - 1 + (number - 1) // len(places)) % len(kinds)]
    kill: dict[str, Any] = {
        "number": draws.randint(earliest, max(earliest, len(steps) - 1)),
        "rank": draws.randrange(options.np),
    }
    kill |= {"place": place, "how": how}
    if place == "evaluation":
        kill["number"] = draws.choice(sorted(calls))
        kill["call"] = draws.randrange(calls[kill["number"]])
    if place == "file":  # whichever rank writes it ends in the middle of it
        at = draws.choice(changed[1:] or changed)
        kill |= {"number": at, "rank": None, "how": "one", "bytes": max(1, steps[at]["file"][2] // 2)}
        kill["number"] = max(1, at)
    return kill


def described(kill: Mapping[str, Any]) -> str:
    how = "SIGXFSZ in the middle of a write" if kill["place"] == "file" else HOW[kill["how"]].format(**kill)
    return f"{PLACES[kill['place']].format(**kill)}, {how}"


def metrics(run: Run, out: Path, expression: str | None) -> dict[str, str]:
    """Return the last match in what the program said, and in each text file that it wrote."""
    if not expression:
        return {}
    found = {}
    for path in [run.said, *(out / name for name, size in run.files.items() if size < 1 << 24)]:
        if matches := re.findall(expression, path.read_text(errors="replace")):
            name = "its output" if path == run.said else str(path.relative_to(out))
            found[name] = "".join(matches[-1])
    return found


def compare_metrics(expected: Mapping[str, str], got: Mapping[str, str], expression: str) -> Verdict:
    if not expected:
        return Verdict("not seen", f"nothing matches {expression}")
    for name, value in expected.items():
        if got.get(name) != value:
            return Verdict("fails", f"{got.get(name, 'none')} instead of {value} in {name}")
    return Verdict("ok", ", ".join(expected.values())[:80])


def one_kill(
    number: int, kill: dict[str, Any], program: Program, options: Namespace, whole: Whole, last: dict[str, str]
) -> dict[str, Any]:
    """Perform it, start the program again, and return the verdicts."""
    out = program.folder / "out" / f"kill-{number}"
    seconds = options.timeout or 60 + 5 * whole.run.seconds
    killed = program.run(f"kill-{number}-killed", out, options.np, seconds, kill)
    row: dict[str, Any] = {
        "number": number,
        "kill": described(kill),
        "command": repeat(number, options),
        "steps": killed.steps,
    }
    ended_first = killed.code == whole.run.code and killed.steps >= whole.steps and kill["place"] != "evaluation"
    if ended_first and kill["how"] != "term":
        return row | {"verdicts": {}, "note": "the place was not reached"}
    torn = [name for name, size in killed.files.items() if size == kill.get("bytes")]
    again = (
        Program(shlex.split(options.resume_command), program.launcher, program.folder, program.grace_seconds)
        if options.resume_command
        else program
    )
    resumed = again.run(f"kill-{number}-resumed", out, options.then_np or options.np, seconds)
    other = (options.then_np or options.np) != options.np
    verdicts = judge(whole, killed, resumed, kill["how"], other)
    if options.metric_regex:
        got = metrics(resumed, out, options.metric_regex)
        verdicts["metrics"] = compare_metrics(last, got, options.metric_regex)
    if not options.keep:
        remove(out)
    row["note"] = f"torn: {torn[0]}" if torn else ""
    return row | {"verdicts": {name: verdicts[name] for name in CAUSES if name in verdicts}}


def repeat(number: int, options: Namespace) -> str:
    """Return the command that repeats this kill."""
    words = [w for w in sys.argv[1 : sys.argv.index("--")] if not w.startswith(("--seed=", "--only-kill="))]
    for name in ("--seed", "--only-kill"):
        if name in words:
            del words[words.index(name) : words.index(name) + 2]
    words += ["--only-kill", str(number), "--seed", str(options.seed)]
    return shlex.join(["python", "-m", str(__package__), *words, "--", *options.command]).replace("'{out}'", "{out}")


def table(rows: Kills, whole: Whole, options: Namespace) -> tuple[str, int]:
    """Return what is printed at the end, and the exit code."""
    performed = [row for row in rows if row["verdicts"]]
    lines = [f"{'guarantee':<18}{'verdict':<10}{'kills':<9}first"]
    failed, unseen = [], []
    for name in CAUSES:
        verdicts = [(row, row["verdicts"][name]) for row in performed if name in row["verdicts"]]
        if not verdicts:
            continue
        wrong = [(row, verdict) for row, verdict in verdicts if verdict.status == "fails"]
        right = [(row, verdict) for row, verdict in verdicts if verdict.status == "ok"]
        status, shown = ("FAILS", wrong) if wrong else ("ok", right) if right else (verdicts[0][1].status, verdicts)
        (row, verdict), kills = shown[0], f"{len(shown)} of {len(verdicts)}"
        text = f"kill {row['number']}: {verdict.text}" if wrong else verdict.text
        lines.append(f"{name:<18}{status:<10}{kills if wrong or right else '':<9}{text}".rstrip())
        failed += [(name, row)] if wrong else []
        unseen += [name] if not wrong and not right else []
    lines.append("")
    for name, row in failed:
        lines.append(f"{name}: {CAUSES[name]}.\n    {row['command']}")
    for row in rows:
        if not row["verdicts"]:
            lines.append(f"kill {row['number']} ({row['kill']}): {row['note']}; nothing is known of it.")
    if unseen:
        lines.append(f"Not judged: {', '.join(unseen)}.")
    unreadable = sorted({error for trace in whole.run.ranks.values() for error in trace.unreadable})
    lines += [f"Not read by the recorder: {error}" for error in unreadable[:3]]
    lines += [] if any(step["file"] for step in whole.run.ranks[0].steps) else [
        "No file as large as half of the weights was seen under {out}: no kill was made while one was written."]  # fmt: skip
    if not performed:
        return "\n".join([*lines, "No kill could be performed."]), 2
    end = (
        f"{len(failed)} of {len(CAUSES)} guarantees fail."
        if failed
        else f"All that was seen held, in {len(performed)} kills."
    )
    return "\n".join([*lines, f"{end} Seed {options.seed}; what the runs said: {options.output_dir}"]), int(
        bool(failed)
    )


def junit(rows: Kills, path: Path) -> None:
    cases = []
    for row in rows:
        for name, verdict in row["verdicts"].items():
            element = {"fails": "failure", "not seen": "skipped", "left out": "skipped"}.get(verdict.status)
            inner = f"<{element} message={quoteattr(verdict.text)}/>" if element else ""
            kill = quoteattr(f"kill {row['number']}: {row['kill']}")
            cases.append(f"<testcase classname={kill} name={quoteattr(name)}>{inner}</testcase>")
    failures = sum("<failure" in case for case in cases)
    text = "\n".join(cases)
    path.write_text(
        f'<testsuite name="hvdtrain.audit" tests="{len(cases)}" failures="{failures}">\n{text}\n</testsuite>\n'
    )


def folder_of(options: Namespace) -> Path:
    """Return the folder for what the audit writes, empty. Raises NotAudited if it has something else in it."""
    folder = Path(options.output_dir).expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / "audit.json").exists())):
        raise NotAudited(f"{folder} has something else in it: choose another --output-dir")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "out").mkdir(parents=True)
    (folder / "audit.json").write_text("{}\n")  # marks it as ours, should this audit be ended
    return folder


def audit(options: Namespace) -> int:
    began = time.monotonic()
    if options.metric_regex:
        try:
            re.compile(options.metric_regex)
        except re.error as error:
            raise NotAudited(f"--metric-regex: {error}") from None
    program = Program(options.command, options.launcher, folder_of(options), options.grace)
    whole, last = whole_runs(program, options)
    facts = f"{options.np} rank{'s' if options.np > 1 else ''}, {whole.steps} steps, {whole.run.seconds:.1f} s, "
    facts += f"seed {options.seed}; two whole runs: {'; '.join(whole.differs.values()) or 'the same bits'}"
    say(facts)
    rows: Kills = []
    for number in [options.only_kill] if options.only_kill else range(1, options.kills + 1):
        kill = draw(number, options, whole)
        say(f"kill {number} of {options.kills}: {described(kill)}")
        rows.append(one_kill(number, kill, program, options, whole, last))
        wrong = [name for name, verdict in rows[-1]["verdicts"].items() if verdict.status == "fails"]
        say(f"    {'fails: ' + ', '.join(wrong) if wrong else rows[-1]['note'] or 'ok'}")
    text, code = table(rows, whole, options)
    sys.stdout.write(f"{facts}\n\n{text}\n")
    if options.junit:
        junit(rows, Path(options.junit))
    for row in rows:
        row["verdicts"] = {name: verdict._asdict() for name, verdict in row["verdicts"].items()}
    result = {name: getattr(options, name) for name in ("command", "launcher", "np", "seed")}
    result |= {"steps": whole.steps, "seconds": round(time.monotonic() - began, 1), "exit_code": code}
    result |= {"whole_runs_differ": whole.differs, "kills": rows}
    (program.folder / "audit.json").write_text(json.dumps(result, indent=1) + "\n")
    return code


def main() -> int:
    options = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: no process stays
        signal.signal(number, signal.default_int_handler)
    try:
        return audit(options)
    except NotAudited as error:
        say(str(error))
    except KeyboardInterrupt:
        say("interrupted: no verdict, and no process is left")
    except OSError as error:
        say(f"{error.filename or 'a file'}: {error.strerror}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
