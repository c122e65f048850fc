"""Compare what ranks have recorded: a whole run, one that was killed, the one that went on. Starts no process.

GUARANTEES, below, is the table: when each one is judged, its rules, and the usual cause. A rule gives a verdict or nothing,
and the first verdict counts.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from .attempts import Run, Step, Trace

Rules = Iterator[Any]
# Of names of files. Not "template" nor "temperature".
TEMPORARY = re.compile(r"tmp|(?<![a-z])(temp|temporary|part|partial)(?![a-z])|\.new(?![a-z])|~")


class Verdict(NamedTuple):
    status: str
    text: str = ""
    step: int | None = None  # the first at which it fails


ok, fails, not_seen, left_out = (partial(Verdict, status) for status in ("ok", "fails", "not seen", "left out"))


class Difference(NamedTuple):
    step: int  # from 1
    rank: int
    expected: Any = None
    got: Any = None
    optimizer: str = ""


@dataclass
class Whole:
    """A whole run, and in what a second one differed from it: that can't be asked of a run that was resumed."""

    run: Run
    differs: dict[str, str] = field(default_factory=dict)  # guarantees that are left out, each with a sentence
    first: str = ""  # what differed first
    ordered: bool = True  # the samples of both came in the same order
    generators: set[str] = field(default_factory=set)  # that both draw from, with the same result


@dataclass
class Case:
    """A run beside the whole one."""

    whole: Whole
    killed: Run  # its steps up to `start` count
    resumed: Run
    how: str = "one"  # one, all, torn or term
    other_ranks: bool = False  # it went on with another number of ranks
    start: int = 0  # steps of the whole run before the first of the resumed one
    known_by: str = "weights"
    comparable: bool = False  # it has steps, and ended well
    starts_over: bool = False  # where it should go on

    def pairs(self, first: bool = False) -> Iterator[tuple[int, int, Step, Step]]:
        """Yield number, rank and both lines of the steps that should be the same; on other ranks, of the first alone. first:
        only those with which an optimizer begins."""
        for rank, trace in self.whole.run.ranks.items():
            steps = self.resumed.trace(rank).steps if not (self.other_ranks and rank) else []
            both = zip(trace.steps[self.start :], steps, strict=False)
            for number, (expected, got) in enumerate(both, self.start + 1):
                if not first or (got["first"] and expected["key"] == got["key"]):
                    yield number, rank, expected, got

    def difference(self, value: Callable[[Step], Any], first: bool = False) -> Difference | None:
        """Return the first step at which a value differs."""
        found = [Difference(number, rank, value(a), value(b), b["key"].split()[0])
                 for number, rank, a, b in self.pairs(first) if value(a) != value(b)]  # fmt: skip
        return min(found, key=lambda one: one[:2], default=None)

    def fails(self, found: Difference, text: str) -> Verdict:
        of_rank = f"rank {found.rank}: " if len(self.whole.run.ranks) > 1 else ""
        return fails(of_rank + text, found.step)

    def samples(self, run: Run, start: int, end: int) -> list[Counter[Any]]:
        """Return how often each sample was used in each step, over all ranks: by index, if all have one, else by content."""
        indexed = self.whole.run.has_indices and self.resumed.has_indices
        used: list[Counter[Any]] = [Counter() for _ in range(start, end)]
        for trace in run.ranks.values():
            for counter, step in zip(used, trace.steps[start:end], strict=False):
                names = [index if indexed else content for content, index in step["rows"]]
                counter.update(name for name in names if name is not None)
        return used


def state_of(generator: str, step: Step) -> Any:
    return step["random"].get(generator)


def resumes(case: Case) -> Rules:
    """Finds out from which step it went on, too."""
    whole, killed, resumed = case.whole.run, case.killed, case.resumed
    yield resumed.code is None and fails(f"it hangs: no end after {resumed.seconds:.0f} s and {resumed.steps} steps")
    yield resumed.code != whole.code and fails(f"it ends with {resumed.code}: {resumed.last_line()}")
    if not resumed.trace(0).steps:
        yield killed.steps >= whole.steps and ok("all steps were done")
        text = f"it ends with {resumed.code} without a step, after {killed.steps} of {whole.steps}"
        yield fails(text, killed.steps + 1)
    case.start, case.known_by = position(case)
    text = (
        f"it begins before step {case.start + 1}, and the killed run had done {killed.steps}: it found another run's "
    )
    yield case.start > killed.steps and fails(f"{text}state. Does it write outside of {{out}}?", 1)
    case.comparable = True
    yield case.start and ok()
    ever = any(step["file"] for step in whole.trace(0).steps)
    yield ever and not checkpoints(killed) and not_seen("it starts over: no checkpoint was there yet")
    case.starts_over = True
    nothing = "" if ever else "; nothing as large as the weights was written under {out}"
    yield fails(f"it starts over{nothing}", 1)


def position(case: Case) -> tuple[int, str]:
    """Return how many steps of the whole run lie before the first of the resumed one, and how that is known."""
    steps, own = case.whole.run.ranks[0].steps, case.resumed.ranks[0].steps[0]
    weights, state = own["before"]
    expected = case.samples(case.whole.run, 0, case.whole.run.steps)
    got = case.samples(case.resumed, 0, min(3, case.resumed.steps))

    def agreement(at: int) -> list[Any]:
        step, before, reached = steps[at], steps[at]["before"], at <= case.killed.steps
        alike = sum(a == b for a, b in zip(expected[at:], got, strict=False))
        signs = [
            before[0] == weights,
            reached and 0 < before[1][2] == state[2],
            reached and any(got) and alike == len(got),
        ]
        random = all(state_of(name, step) == state_of(name, own) for name in case.whole.generators)
        return [*signs, before[1] == state, alike, step["options"] == own["options"], random, reached, at]

    alike = [agreement(at) for at, step in enumerate(steps) if step["key"] == own["key"]]
    best = max(alike, default=[False] * 3)
    for name, holds in zip(("weights", "the optimizer's count of steps", "samples"), best, strict=False):
        if holds:
            return best[-1], name
    return max(0, case.whole.run.steps - case.resumed.steps), "the number of steps that followed"


def checkpoints(run: Run) -> list[tuple[int, str]]:
    """Return the complete files with weights: the step before which each was written, and its path."""
    files = [step["file"] for step in run.trace(0).steps]
    new = [at for at, (old, file) in enumerate(zip([[], *files], files, strict=False), 1) if file and file != old]
    # A checkpoint may be written in the background: a file counts once it was there for three steps.
    return [(at, files[at - 1][1]) for at in new if at + 2 <= run.steps]


def work_repeated(case: Case) -> Rules:
    """Fails if the killed run had completed a later checkpoint than the one from which it went on."""
    done, text = checkpoints(case.killed), f"{case.killed.steps - case.start} steps"
    # What is in a file is later than the time at which the one before it was complete.
    if len(done) > 1 and case.start + 1 < done[-2][0] - 1:
        text += ", although {1} was written before step {0}".format(*done[-1])
        yield fails(text, case.start + 1)
    yield case.starts_over and fails(f"all {text}", 1)
    seen = any(step["file"] for step in case.killed.trace(0).steps)
    yield ok(text) if seen else not_seen(f"{text}; no checkpoint was seen under {{out}}")


def weights(case: Case) -> Rules:
    if found := case.difference(lambda step: step["before"][0], first=True):
        at = f"before step {found.step}"
        none = f"those of no step of the whole run; {case.known_by} say: {at}"
        yield case.fails(found, f"{f'not those {at}' if case.known_by == 'weights' else none} ({found.optimizer})")
    # Buffers are read after the step, in which they change by what it was given.
    given = case.difference(
        lambda step: [step["rows"], *(state_of(name, step) for name in case.whole.generators)], True
    )
    found = None if given or case.other_ranks else case.difference(lambda step: step["buffers"], first=True)
    yield found and case.fails(found, "buffers of the model, such as running means, differ")
    absent = sorted(set(case.whole.run.ranks) - set(case.resumed.ranks)) if not case.other_ranks else []
    yield absent and fails(f"ranks {absent} did not train")
    yield ok() if any(case.pairs(first=True)) else not_seen("no optimizer begins where it went on")


def optimizer_state(case: Case) -> Rules:
    if found := case.difference(lambda step: step["before"][1], first=True):
        (expected, *_), (got, *_) = found.expected, found.got
        text = f"for {got} parameters instead of {expected}" if got != expected else "other values"
        yield case.fails(found, f"{found.optimizer}: {text}")
    seen = any(step["before"][1][0] for _, _, step, _ in case.pairs(first=True))
    yield ok() if seen else not_seen("the optimizer has no state")


def learning_rates(case: Case) -> Rules:
    """And the other options of each group of the optimizer."""
    other_length = case.other_ranks and case.start + case.resumed.steps != case.whole.run.steps
    yield other_length and left_out("another number of ranks, and of steps")
    if found := case.difference(lambda step: step["options"]):
        groups = zip(found.expected, found.got, strict=False)
        pairs = [(name, group.get(name), other.get(name)) for group, other in groups for name in group | other]
        counts = "the number of groups", len(found.expected), len(found.got)
        name, expected, got = next((pair for pair in pairs if pair[1] != pair[2]), counts)
        expected, got = (f"{value:.6g}" if isinstance(value, float) else value for value in (expected, got))
        yield case.fails(found, f"step {found.step}: {name} {got} instead of {expected}")
    yield ok()


def same_at_each_step(name: str, said: str, unseen: str, case: Case) -> Rules:
    yield not any(step[name] for step in case.whole.run.trace(0).steps) and not_seen(unseen)
    if found := case.difference(lambda step: step[name]):
        expected, got = (", ".join(map(str, value)) for value in (found.expected, found.got))
        yield case.fails(found, f"step {found.step}: {said} {got} instead of {expected}")
    yield ok()


def random_numbers(case: Case) -> Rules:
    names = sorted(case.whole.generators)
    first = {name: found.step for name in names if (found := case.difference(partial(state_of, name)))}
    if first:
        text = ", ".join(f"{name} from step {number} on" for name, number in first.items())
        later = {judged(name, case).status for name in ("samples", "augmentation", "losses", "evaluations")}
        without_effect = later <= {"ok", "not seen"} and judged("final weights", case).status == "ok"
        yield without_effect and ok(f"{text}; without effect: samples, losses and final weights are the same")
        yield fails(text, min(first.values()))
    yield ok(", ".join(names)) if names else not_seen("no global generator is drawn from")


def samples(case: Case) -> Rules:
    whole = case.whole.run
    expected = case.samples(whole, 0, whole.steps)
    # A rank that was stopped within a step that another has ended and saved had computed its part of it, and not told so.
    ended = {
        rank: Trace((own := case.killed.trace(rank).steps) + trace.steps[len(own) : case.start])
        for rank, trace in whole.ranks.items()
    }
    before = case.samples(replace(case.killed, ranks=ended), 0, case.start)
    got = before + case.samples(case.resumed, 0, case.resumed.steps)
    wanted, used = (sum(counters, Counter[Any]()) for counters in (expected, got))
    yield not wanted and not_seen("no sample passed through the arguments of a module")
    more = used - wanted
    lost, repeated = (wanted - used).total(), sum(number for one, number in more.items() if one in wanted)
    text = f"of {wanted.total()}, {lost} lost, {repeated} repeated" if lost or more else ""
    if more.total() > repeated:
        text += f", {more.total() - repeated} of content that the whole run never had"
    if not case.whole.ordered or case.other_ranks:
        yield fails(text) if text else ok("each as often; their order is left out")
    differing = [at for at in range(case.start, min(len(expected), len(got))) if expected[at] != got[at]]
    number = 1 + min([*differing, len(expected), len(got)])
    text = text or "each as often, in another order" if differing else text
    yield text and fails(f"{text}, from step {number} on", number)
    yield ok(str(wanted.total()))


def augmentation(case: Case) -> Rules:
    yield not case.whole.run.has_indices and not_seen("no DataLoader told the indices of samples")
    changed: list[int] = []  # number of the step, for each sample
    compared = 0
    for number, _, a, b in case.pairs():
        if [index for _, index in a["rows"]] == [index for _, index in b["rows"]]:
            compared += len(a["rows"])
            changed += [number for row, other in zip(a["rows"], b["rows"], strict=True) if row != other]
    text = f"other content in {len(changed)} of {compared} uses of the same samples, from step"
    yield changed and fails(f"{text} {min(changed)} on", min(changed))
    yield ok() if compared else not_seen("no step had the same samples")


def evaluations(case: Case) -> Rules:
    compared = False
    for rank, trace in case.whole.run.ranks.items():
        for number, calls in trace.evaluations.items():
            got = case.resumed.trace(rank).evaluations.get(number - case.start)
            # One right after the checkpoint may have been over before it was written.
            if number > case.start or (number == case.start and got):
                inputs = got and [one for one, _ in got] != [one for one, _ in calls]
                what = "missing" if not got else "other inputs" if inputs else "other results"
                yield got != calls and case.fails(Difference(number, rank), f"after step {number}: {what}")
                compared = True
    yield ok() if compared else not_seen("no evaluation came after the resume")


def metrics(case: Case) -> Rules:
    wanted, got = case.whole.run.metrics or {}, case.resumed.metrics or {}
    yield not wanted and not_seen("--metric-regex found none")
    for name, value in wanted.items():
        yield got.get(name) != value and fails(f"{got.get(name, 'none')} instead of {value} in {name}")
    yield ok(", ".join(wanted.values())[:80])


def final_weights(case: Case) -> Rules:
    for rank, trace in case.whole.run.ranks.items():
        last, got = ({step["key"]: step["after"][0] + step["buffers"] for step in steps}
                     for steps in (trace.steps, case.resumed.trace(rank).steps))  # fmt: skip
        # An optimizer that made no step after the resume has nothing to compare.
        differs = any(last.get(key) != value for key, value in got.items())
        yield differs and case.fails(Difference(case.whole.run.steps, rank), "other bits")
    yield ok()


def number_of_steps(case: Case) -> Rules:
    number = case.start + case.resumed.steps
    status = "ok" if number == case.whole.run.steps else "left out" if case.other_ranks else "fails"
    yield Verdict(status, f"{number} of {case.whole.run.steps}")


def exit_codes(case: Case) -> Rules:
    whole, killed, resumed = case.whole.run, case.killed, case.resumed
    text = f"after the kill, the other processes did not end in {killed.seconds:.0f} s"
    yield killed.code is None and fails(text)
    text = f"0 after {'SIGTERM' if case.how == 'term' else 'the kill'}, with {killed.steps} of {whole.steps} steps done"
    yield killed.code == 0 and killed.steps < whole.steps and fails(text, killed.steps)
    yield resumed.code not in (None, whole.code) and fails(f"{resumed.code} instead of {whole.code}")
    yield not killed.in_grace and ok("it did not end in the grace time after SIGTERM")
    yield ok(f"{killed.code}, then {resumed.code}")


def left_behind(case: Case) -> Rules:
    processes = case.killed.left + case.resumed.left
    yield processes and fails(f"processes that still run: {len(processes)}, such as {processes[0]}")
    # Without numbers: those of steps, times, processes.
    usual = {re.sub(r"\d+", "#", path) for path in case.whole.run.files}
    more = [path for path in case.resumed.files if re.sub(r"\d+", "#", path) not in usual]
    temporary = [path for path in more if TEMPORARY.search(path.lower())]
    yield temporary and fails(f"{len(temporary)} temporary files, such as {temporary[0]}")
    yield ok(f"{len(more)} files more than after the whole run, such as {more[0]}" if more else "")


class Guarantee(NamedTuple):
    judged: int
    rules: Callable[[Case], Rules]
    cause: str


# When it is judged: always; if steps can be compared; if two whole runs have the same bits; and on the same ranks alone.
ALWAYS, STEPS, BITS, RANKS = range(4)
GUARANTEES = {
    "resumes": Guarantee(ALWAYS, resumes,
        "the program finds no checkpoint under {out}, can't read it, or takes one of another run"),
    "work repeated": Guarantee(STEPS, work_repeated,
        "an older checkpoint is taken although a newer one is complete: names are sorted as text, for example"),
    "weights": Guarantee(BITS, weights, "the model is not saved whole, or something overwrites it after it was loaded"),
    "optimizer state": Guarantee(BITS, optimizer_state,
        "the optimizer's state_dict is not in the checkpoint, or is loaded before the model moves"),
    "learning rates": Guarantee(STEPS, learning_rates,
        "the scheduler's state_dict is not in the checkpoint: its schedule starts again"),
    "gradient scaler": Guarantee(RANKS, partial(same_at_each_step, "scale", "scale and count", "no GradScaler is used"),
        "the GradScaler's state_dict is not in the checkpoint: its scale starts again"),
    "random numbers": Guarantee(RANKS, random_numbers,
        "the generators' states are not in the checkpoint, or iter(DataLoader) draws after they were set"),
    "samples": Guarantee(STEPS, samples,
        "the position in the data is not in the checkpoint: a DataLoader starts its epoch again, or shuffles anew; "
        "or it was saved between micro-batches, and gradients so far are lost: save after optimizer.step()"),
    "augmentation": Guarantee(RANKS, augmentation,
        "the random numbers of the data set are not restored: the same samples come with other content"),
    "losses": Guarantee(RANKS, partial(same_at_each_step, "loss", "loss", "no loss was passed to backward()"),
        "one of the rows above; or the loss depends on something that is not saved, such as a running average"),
    "evaluations": Guarantee(RANKS, evaluations,
        "one of the rows above; or averaged weights (EMA) or a metric's state are not in the checkpoint"),
    "metrics": Guarantee(RANKS, metrics, "one of the rows above; or the metric's running sums are not in the checkpoint"),
    "final weights": Guarantee(RANKS, final_weights, "one of the rows above"),
    "number of steps": Guarantee(STEPS, number_of_steps,
        "the loop counts again from the beginning of an epoch, or skips the rest of one"),
    "exit codes": Guarantee(ALWAYS, exit_codes,
        "what starts jobs reads the exit code: 0 must mean that the training is complete, and nothing else"),
    "left behind": Guarantee(ALWAYS, left_behind,
        "processes or temporary files of the killed run stay: the next start should remove them"),
}  # fmt: skip


def judged(name: str, case: Case) -> Verdict:
    return next(verdict for verdict in GUARANTEES[name].rules(case) if verdict)  # type: ignore[no-any-return] # see Rules


def all_bits(reason: str) -> dict[str, str]:
    return {name: reason for name, guarantee in GUARANTEES.items() if guarantee.judged >= BITS}


def compare_wholes(run: Run, again: Run) -> Whole:
    """Return what differs between two whole runs, which is left out later."""
    for rank, trace in run.ranks.items():
        for step, other in zip(trace.steps, again.trace(rank).steps, strict=False):
            if step["before"][1][0] < 0:  # the first run has read weights alone, but for its first step
                step["before"][1] = other["before"][1]
    whole = Whole(run)
    case = Case(whole, replace(again, ranks={}), again)
    following = [pair for trace in run.ranks.values() for pair in zip(trace.steps, trace.steps[1:], strict=False)]
    drawn = {name for a, b in following for name in b["random"] if state_of(name, a) != state_of(name, b)}
    whole.generators = {name for name in drawn if not case.difference(partial(state_of, name))}
    verdicts = {name: judged(name, case) for name, one in GUARANTEES.items() if one.judged != ALWAYS}
    wrong = {name: verdict.step or run.steps for name, verdict in verdicts.items() if verdict.status == "fails"}
    if drawn and not whole.generators:
        wrong["random numbers"] = 1
    whole.differs = {name: f"two whole runs differ from step {step} on" for name, step in wrong.items()}
    if wrong:
        first = min(wrong.values())
        whole.first = f"they differ from step {first} on: {', '.join(name for name in wrong if wrong[name] == first)}"
    # From a weight or a loss that differs, all other bits follow.
    if wrong.keys() & {"weights", "losses", "final weights"}:
        whole.differs = all_bits(f"two whole runs differ from step {first} on") | whole.differs
    whole.ordered = "samples" not in wrong
    if not whole.ordered and judged("samples", case).status == "ok":
        del whole.differs["samples"]
    return whole


def judge(case: Case) -> dict[str, Verdict]:
    """Return the verdict on each guarantee that can be judged."""
    verdicts = {"resumes": judged("resumes", case)}
    differs, before = case.whole.differs, Case(case.whole, case.killed, case.killed)
    for value in (lambda step: step["after"][0], lambda step: step["loss"]):
        found = before.difference(value)
        if found and found.step <= case.start:  # a rare difference, that two whole runs did not show
            differs = all_bits(f"the killed run differed from the whole one from step {found.step} on") | differs
    for name, guarantee in GUARANTEES.items():
        unasked = name == "metrics" and case.whole.run.metrics is None
        if name in verdicts or unasked or (guarantee.judged != ALWAYS and not case.comparable):
            continue
        if name in differs:
            verdicts[name] = left_out(differs[name])
        elif guarantee.judged == RANKS and case.other_ranks:
            verdicts[name] = left_out("another number of ranks")
        else:
            verdicts[name] = judged(name, case)
            if guarantee.judged != ALWAYS and not case.start and verdicts[name].status == "ok":
                # That it ends like the whole run says only that it repeats.
                verdicts[name] = not_seen("it starts over: nothing was restored")
    return verdicts
