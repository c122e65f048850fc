"""The audit from its command line to its exit code: whole runs, kills, verdicts, a table."""

import dataclasses
import json
import random
import shlex
import shutil
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from . import parse
from .attempts import NotAudited, Program, Run
from .verdicts import GUARANTEES, Case, Whole, compare_wholes, judge

ELSEWHERE = "a second whole run went on from the first one: the program keeps its state elsewhere, not under {out}"
UNSEEN = "no optimizer made a step that could be seen: the audit sees torch.optim in Python 3 that reads PYTHONPATH"
PLACES = {
    "step": "after step {number}",
    "within": "within the step after step {number}",
    "evaluation": "in an evaluation after step {number}",
    "file": "while a file is written after step {number}",
    "between": "between two changes of files after step {number}",
}
HOW = {
    "one": "SIGKILL of rank {rank}",
    "all": "SIGKILL of all",
    "term": "SIGTERM to the launcher",
    "torn": "SIGXFSZ in the middle of a write",
}
Rows = list[dict[str, Any]]  # one for each kill


def say(text: str) -> None:
    sys.stderr.write(f"audit: {text}\n")
    sys.stderr.flush()


def refuse(reason: object, text: str) -> None:
    if reason:
        raise NotAudited(text)


def whole_runs(program: Program, options: Namespace) -> Whole:
    """Run the program twice. Raises NotAudited if nothing could be said after that."""
    runs: list[Run] = []
    for name, read in (("whole", "weights"), ("again", "state")):  # each a part: that costs time
        out = program.folder / "out" / name
        run = program.run(name, out, options.np, options.timeout or 3600, read=read)
        taken = f"{run.seconds:.0f} s, without any kill"
        refuse(run.code is None, f"the program has not ended after {taken}: raise --timeout")
        refuse(run.code, f"the program itself ends with {run.code}, without any kill: {run.last_line()} ({run.said})")
        refuse(not run.steps, ELSEWHERE if runs else f"{UNSEEN} ({run.said})")
        as_ranks = f"-np {options.np}, but the program trained as ranks {sorted(run.ranks)}: --launcher starts them"
        refuse(sorted(run.ranks) != list(range(options.np)), as_ranks)
        runs.append(run)
        began, before = (one.ranks[0].steps[0]["before"][0] for one in (runs[0], run))
        reached = any(step["after"][0] == before for step in runs[0].ranks[0].steps)
        refuse(began != before and reached, ELSEWHERE)  # the same: steps with a rate of 0 reach it, too
        say(f"{name}: {run.steps} steps, {run.seconds:.1f} s")
        if not options.keep:
            shutil.rmtree(out, ignore_errors=True)
    return compare_wholes(*runs)


def draw(number: int, options: Namespace, whole: Whole) -> dict[str, Any]:
    """Return the place and the kind of a kill: kinds in turn, the place drawn after the first checkpoint."""
    draws, trace = random.Random(f"{options.seed}-{number}"), whole.run.ranks[0]
    files, last = [step["file"] for step in trace.steps], max(1, whole.run.steps - 1)
    written = [at for at, (old, new) in enumerate(zip([[], *files], files, strict=False)) if new and new != old]
    earliest = min(max(written[0] + 1 if written else whole.run.steps // 5, options.from_step), last)
    evaluations = sorted(after for after in trace.evaluations if after >= earliest)
    places = ["step", "within", *["evaluation"] * bool(evaluations), *["file"] * bool(written)]
    # A save of several files, each of them complete, may be half of one and half of another.
    several = [at for at in written if at >= earliest and trace.steps[at]["changes"] > 1]
    places += ["between"] * bool(several)
    kinds = [how for how in options.signals.split(",") if how != "all" or options.np > 1] or ["one"]
    kill: dict[str, Any] = {"place": places[(number - 1) % len(places)], "number": draws.randint(earliest, last)}
    kill |= {"how": kinds[(number - 1 + (number - 1) // len(places)) % len(kinds)], "rank": draws.randrange(options.np)}
    if kill["place"] == "evaluation":
        kill["number"] = draws.choice(evaluations)
        kill["call"] = draws.randrange(len(trace.evaluations[kill["number"]]))
    if kill["place"] == "between":
        at = draws.choice(several)
        kill |= {"number": max(1, at), "rank": 0, "how": "one", "change": draws.randint(2, trace.steps[at]["changes"])}
    if kill["place"] == "file":  # whichever rank writes it ends in the middle of it
        at = draws.choice([at for at in written if at >= earliest] or written[-1:])
        kill |= {"number": max(1, at), "rank": None, "how": "torn", "bytes": max(1, files[at][2] // 2)}
    return kill


def one_kill(number: int, program: Program, options: Namespace, whole: Whole) -> dict[str, Any]:
    """Perform it, start the program again, and return the verdicts."""
    kill, out = draw(number, options, whole), program.folder / "out" / f"kill-{number}"
    said = f"{PLACES[kill['place']]}, {HOW[kill['how']]}".format(**kill)
    say(f"kill {number} of {options.kills}: {said}")
    seconds, ranks = options.timeout or 60 + 5 * whole.run.seconds, options.then_np or options.np
    killed = program.run(f"kill-{number}-killed", out, options.np, seconds, kill)
    row = {"number": number, "kill": said, "command": repeat(number, options), "steps": killed.steps, "verdicts": {}}
    ended_first = killed.code == whole.run.code and killed.steps >= whole.run.steps and kill["place"] != "evaluation"
    if ended_first and kill["how"] != "term":
        return row | {"note": "the place was not reached"}
    torn = [f"torn: {name}" for name, size in killed.files.items() if size == kill.get("bytes")]
    again = dataclasses.replace(program, command=options.resume_command or program.command)
    resumed = again.run(f"kill-{number}-resumed", out, ranks, seconds)
    if not options.keep:
        shutil.rmtree(out, ignore_errors=True)
    verdicts = judge(Case(whole, killed, resumed, kill["how"], ranks != options.np))
    return row | {"note": "".join(torn[:1]), "verdicts": verdicts}


def repeat(number: int, options: Namespace) -> str:
    """Return the command that repeats this kill."""
    words = sys.argv[1 : sys.argv.index("--")]
    own = {"--only-kill": number, "--seed": options.seed}
    words += [f"{name}={value}" for name, value in own.items() if name not in " ".join(words)]
    return shlex.join(["python", "-m", str(__package__), *words, "--", *options.command]).replace("'{out}'", "{out}")


def table(rows: Rows, whole: Whole, options: Namespace) -> tuple[str, int]:
    """Return what is printed at the end, and the exit code."""
    lines, unseen = [f"{'guarantee':<18}{'verdict':<10}{'kills':<9}first"], []
    causes: dict[str, list[str]] = {}  # by the command that repeats the first kill that shows them
    for name, guarantee in GUARANTEES.items():
        judged = [(row["verdicts"][name], row) for row in rows if name in row["verdicts"]]
        if not judged:
            continue
        status = min((verdict.status for verdict, _ in judged), key=["fails", "ok", "not seen", "left out"].index)
        alike = [(verdict.text, row) for verdict, row in judged if verdict.status == status]
        (text, row), kills = alike[0], f"{len(alike)} of {len(judged)}"
        if status == "fails":
            causes.setdefault(row["command"], []).append(f"{name}: {guarantee.cause}.")
            status, text = "FAILS", f"kill {row['number']}: {text}"
        elif status != "ok":
            unseen.append(name)
            kills = ""
        lines.append(f"{name:<18}{status:<10}{kills:<9}{text}".rstrip())
    lines += ["", *(line for command, texts in causes.items() for line in [*texts, f"    {command}"])]
    lines += [f"kill {row['number']} ({row['kill']}): {row['note']}; nothing is known of it."
              for row in rows if not row["verdicts"]]  # fmt: skip
    lines += [f"Not judged: {', '.join(unseen)}."] if unseen else []
    unreadable = sorted({error for trace in whole.run.ranks.values() for error in trace.unreadable})
    lines += [f"Not read by the recorder: {error}" for error in unreadable[:3]]
    if not any(step["file"] for step in whole.run.ranks[0].steps):
        no_kill = "no kill was made while one was written"
        lines.append(f"No file as large as half of the weights was seen under {{out}}: {no_kill}.")
    performed = sum(row["verdicts"]["resumes"].status != "not seen" for row in rows if row["verdicts"])
    held = f"All that was seen held, in {performed} kill{'s' * (performed > 1)}."
    if causes:
        held = f"{sum(map(len, causes.values()))} of {len(GUARANTEES)} guarantees fail."
    elif not performed:
        held = "No kill came after a checkpoint: nothing is known. Let the program save earlier, or run longer."
    lines.append(f"{held} Seed {options.seed}; what the runs said: {options.output_dir}")
    return "\n".join(lines), 1 if causes else 2 * (not performed)


def junit(rows: Rows, path: str) -> None:
    suite = ElementTree.Element("testsuite", name="hvdtrain.audit")
    for row in rows:
        of_kill = {"classname": f"kill {row['number']}: {row['kill']}"}
        for name, verdict in row["verdicts"].items():
            case = ElementTree.SubElement(suite, "testcase", of_kill, name=name)
            if verdict.status != "ok":
                element = "failure" if verdict.status == "fails" else "skipped"
                said = "".join(c if c.isprintable() else "?" for c in verdict.text)  # XML has no control characters
                ElementTree.SubElement(case, element, message=said)
    suite.attrib |= {"tests": str(len(suite)), "failures": str(len(suite.findall(".//failure")))}
    ElementTree.ElementTree(suite).write(path)


def folder_of(options: Namespace) -> Path:
    """Return the folder for what the audit writes, empty. Raises NotAudited if it has something else in it."""
    folder = Path(options.output_dir).expanduser().resolve()
    free = not folder.exists() or (folder / "audit.json").exists() or (folder.is_dir() and not any(folder.iterdir()))
    refuse(not free, f"{folder} has something else in it: choose another --output-dir")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "out").mkdir(parents=True)
    (folder / "audit.json").write_text("{}\n")  # marks it as ours, should this audit be ended
    return folder


def audit(options: Namespace) -> int:
    began = time.monotonic()
    program = Program(options.command, options.launcher, folder_of(options), options.grace, options.metric_regex)
    whole = whole_runs(program, options)
    facts = f"{options.np} rank{'s' if options.np > 1 else ''}, {whole.run.steps} steps, {whole.run.seconds:.1f} s, "
    facts += f"seed {options.seed}; two whole runs: {whole.first or 'the same bits'}"
    say(facts)
    rows: Rows = []
    for number in [options.only_kill] if options.only_kill else range(1, options.kills + 1):
        rows.append(one_kill(number, program, options, whole))
        wrong = [name for name, verdict in rows[-1]["verdicts"].items() if verdict.status == "fails"]
        say(f"    {'fails: ' + ', '.join(wrong) if wrong else rows[-1]['note'] or 'ok'}")
    text, code = table(rows, whole, options)
    sys.stdout.write(f"{facts}\n\n{text}\n")
    if options.junit:
        junit(rows, options.junit)
    for row in rows:
        row["verdicts"] = {name: verdict._asdict() for name, verdict in row["verdicts"].items()}
    result = {name: getattr(options, name) for name in ("command", "launcher", "np", "seed")}
    result |= {"steps": whole.run.steps, "seconds": round(time.monotonic() - began, 1), "exit_code": code}
    result |= {"whole_runs_differ": whole.differs, "kills": rows}
    (program.folder / "audit.json").write_text(json.dumps(result, indent=1) + "\n")
    return code


def main() -> int:
    try:
        Path.cwd()
    except OSError as error:
        say(f"the working directory cannot be found ({error.strerror}): cd to one that exists")
        return 2
    options = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: no process stays
        if signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
            signal.signal(number, signal.default_int_handler)
    try:
        return audit(options)
    except NotAudited as error:
        say(str(error))
    except KeyboardInterrupt:
        say("interrupted: no verdict, and no process is left")
    except OSError as error:
        say(f"{error.filename or options.output_dir}: {error.strerror}: choose another --output-dir")
    return 2


if __name__ == "__main__":
    sys.exit(main())
