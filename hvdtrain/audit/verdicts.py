"""Compare what ranks have recorded: a whole run, one that was killed, the one that went on. Starts no process."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .runs import Run, Step, Trace

# Each guarantee, and the usual cause where it fails.
CAUSES = {
    "resumes": "the program finds no checkpoint under {out}, can't read it, or takes one of another run",
    "work repeated": "an older checkpoint is taken although a newer one is complete: names are sorted as text, for example",
    "weights": "the model is not saved whole, or something overwrites it after it was loaded",
    "optimizer state": "the optimizer's state_dict is not in the checkpoint, or is loaded before the model moves",
    "learning rates": "the scheduler's state_dict is not in the checkpoint: its schedule starts again",
    "gradient scaler": "the GradScaler's state_dict is not in the checkpoint: its scale starts again",
    "random numbers": "the generators' states are not in the checkpoint, or iter(DataLoader) draws after they were set",
    "samples": "the position in the data is not in the checkpoint: a DataLoader starts its epoch again, or shuffles anew",
    "augmentation": "the random numbers of the data set are not restored: the same samples come with other content",
    "losses": "one of the rows above; or the loss depends on something that is not saved, such as a running average",
    "evaluations": "one of the rows above; or averaged weights (EMA) or a metric's state are not in the checkpoint",
    "metrics": "one of the rows above; or the metric's running sums are not in the checkpoint",
    "final weights": "one of the rows above",
    "number of steps": "the loop counts again from the beginning of an epoch, or skips the rest of one",
    "exit codes": "what starts jobs reads the exit code: 0 must mean that the training is complete, and nothing else",
    "left behind": "processes or temporary files of the killed run stay: the next start should remove them",
}
BITS = (
    "weights",
    "optimizer state",
    "gradient scaler",
    "random numbers",
    "augmentation",
    "losses",
    "evaluations",
    "final weights",
)


class Verdict(NamedTuple):
    status: str  # ok, fails, not seen, left out
    text: str = ""
    step: int | None = None  # the first at which it fails


@dataclass
class Whole:
    """A whole run, and in what a second one differed from it: that can't be asked of a run that was resumed."""

    run: Run
    differs: dict[str, str]  # each with a sentence
    generators: set[str]  # that the program draws from, with the same result in both runs

    @property
    def steps(self) -> int:
        return self.run.steps


def first(pairs: Iterable[bool]) -> int | None:
    """Return the position of the first that is true."""
    return next((number for number, different in enumerate(pairs) if different), None)


def before_each(steps: Sequence[Step]) -> list[tuple[str, list[Any]]]:
    """Return weights and optimizer state before each step: those after the same optimizer's last one."""
    latest: dict[str, tuple[str, list[Any]]] = {}
    states = []
    for step in steps:
        if "before" in step:
            latest[step["key"]] = (step["before"]["weights"], step["before"]["state"])
        states.append(latest[step["key"]])
        latest[step["key"]] = (step["weights"], step.get("state", []))
    return states


def identities(step: Step, indexed: bool) -> list[Any]:
    return [index if indexed else content for content, index in step["rows"] if index is not None or not indexed]


def has_indices(trace: Trace) -> bool:
    return any(index is not None for step in trace.steps for _, index in step["rows"])


def used(run: Run, start: int, end: int, indexed: bool) -> list[Counter[Any]]:
    """Return how often each sample was used, for each step over all ranks."""
    traces = run.ranks.values()
    return [
        Counter(one for trace in traces for step in trace.steps[at : at + 1] for one in identities(step, indexed))
        for at in range(start, end)
    ]


def total(counters: Iterable[Counter[Any]]) -> Counter[Any]:
    result: Counter[Any] = Counter()
    for counter in counters:
        result.update(counter)
    return result


def states(generators: set[str]) -> Callable[[Step], Any]:
    return lambda step: [step["random"].get(name) for name in generators]


def drawn_from(run: Run) -> set[str]:
    """Return the generators whose states change between two steps of a rank."""
    return {
        name
        for trace in run.ranks.values()
        for a, b in zip(trace.steps, trace.steps[1:], strict=False)
        for name in b["random"]
        if a["random"].get(name) != b["random"][name]
    }


def compare_wholes(whole: Run, again: Run) -> Whole:
    names: dict[str, Callable[[Step], Any]] = {
        "samples": lambda step: sorted(map(str, identities(step, indexed))),
        "augmentation": lambda step: step["rows"],
        "random numbers": lambda step: states(drawn)(step),
        "learning rates": lambda step: step["lr"],
        "losses": lambda step: step["loss"],
        "weights": lambda step: [step["weights"], step["buffers"]],
        "optimizer state": lambda step: step["state"],
    }
    generators = drawn_from(whole)
    drawn = {name for name in generators if first_difference(whole, again, states({name})) is None}
    indexed = any(map(has_indices, whole.ranks.values()))
    found = {}
    for name, value in names.items():
        number = first_difference(whole, again, value)
        if number is not None or (name == "random numbers" and generators and not drawn):
            found[name] = f"two whole runs differ from step {number or 1} on"
    for rank, trace in whole.ranks.items():
        other = again.ranks.get(rank, Trace()).evaluations
        if [(line["in"], line["out"]) for line in trace.evaluations] != [(line["in"], line["out"]) for line in other]:
            found["evaluations"] = "evaluations of two whole runs differ"
    return Whole(whole, found, drawn)


def first_difference(run: Run, other: Run, value: Callable[[Step], Any]) -> int | None:
    """Return the number of the first step at which a rank differs."""
    for rank, trace in run.ranks.items():
        steps = other.ranks.get(rank, Trace()).steps
        at = first(value(a) != value(b) for a, b in zip(trace.steps, steps, strict=False))
        if at is not None or len(trace.steps) != len(steps):
            return 1 + (min(len(trace.steps), len(steps)) if at is None else at)
    return None


def position(whole: Whole, killed: Run, resumed: Run) -> tuple[int, str]:
    """Return how many steps of the whole run lie before the first of the resumed one, and how that is known."""
    steps, first_step = whole.run.ranks[0].steps, resumed.ranks[0].steps[0]
    before, own = before_each(steps), first_step["before"]
    indexed, random = has_indices(whole.run.ranks[0]) and has_indices(resumed.ranks[0]), states(whole.generators)
    expected, got = used(whole.run, 0, whole.steps, indexed), used(resumed, 0, 3, indexed)

    def agrees(at: int) -> tuple[Any, ...]:
        same_samples = sum(a == b for a, b in zip(expected[at : at + 3], got, strict=False))
        alike = [steps[at][name] == first_step[name] for name in ("lr", "options")]
        alike.append(random(steps[at]) == random(first_step))
        return (before[at][1] == own["state"], same_samples, *alike, at <= killed.steps, at)

    same_key = [at for at, step in enumerate(steps) if step["key"] == first_step["key"]]
    found = [at for at in same_key if before[at][0] == own["weights"]]
    if found:
        return max(found, key=agrees), "weights"
    age = own["state"][2]
    by_age = [at for at in same_key if at <= killed.steps and before[at][1][2] == age] if age else []
    if by_age:
        return by_age[0], "the optimizer's count of steps"
    by_samples = [at for at in same_key if at <= killed.steps and got[0] and expected[at : at + 3] == got]
    if by_samples:
        return by_samples[-1], "samples"
    return max(0, whole.steps - resumed.steps), "the number of steps that followed"


def judge(whole: Whole, killed: Run, resumed: Run, how: str, other_ranks: bool) -> dict[str, Verdict]:
    """Return the verdict on each guarantee. how: one, all or term. other_ranks: it went on with another number of ranks."""
    verdicts: dict[str, Verdict] = {}
    verdicts["exit codes"] = exit_codes(whole, killed, resumed, how)
    verdicts["left behind"] = left_behind(whole, killed, resumed)
    resumes = does_it_go_on(whole, killed, resumed)
    if resumes:
        return {"resumes": resumes} | verdicts
    start, known_by = position(whole, killed, resumed)
    repeated, newer = killed.steps - start, newer_checkpoint(killed, start)
    if repeated < 0:
        text = f"it begins before step {start + 1}, and the killed run had done {killed.steps}: it found another run's"
        return {"resumes": Verdict("fails", text + " state. Does it write outside of {out}?", 1)} | verdicts
    if start == 0 and killed.steps and any(step["file"] for step in killed.ranks[0].steps):
        verdicts["resumes"] = Verdict("fails", "it starts over", 1)
    elif start == 0 and killed.steps and not any(step["file"] for step in whole.run.ranks[0].steps):
        verdicts["resumes"] = Verdict(
            "fails", "it starts over; nothing as large as the weights was written under {out}", 1
        )
    else:
        verdicts["resumes"] = Verdict("ok", "" if start else "it starts over: no checkpoint was there yet")
    verdicts["work repeated"] = Verdict(
        "fails" if newer else "ok", f"{repeated} steps{newer}", start + 1 if newer else None
    )
    compared = Comparison(whole, killed, resumed, start, known_by, other_ranks)
    verdicts |= compared.verdicts()
    return verdicts


def does_it_go_on(whole: Whole, killed: Run, resumed: Run) -> Verdict | None:
    """Return a verdict where the second start has no step that could be compared, or does not end well."""
    if resumed.code is None:
        return Verdict("fails", f"it hangs: no end after {resumed.seconds:.0f} s and {resumed.steps} steps")
    if resumed.code != whole.run.code:
        return Verdict("fails", f"it ends with {resumed.code}: {resumed.last_line()}")
    if resumed.steps and 0 in resumed.ranks and resumed.ranks[0].steps:
        return None
    if killed.steps >= whole.steps:
        return Verdict("ok", "all steps were done")
    return Verdict(
        "fails", f"it ends with {resumed.code} without a step, after {killed.steps} of {whole.steps}", killed.steps + 1
    )


def newer_checkpoint(killed: Run, start: int) -> str:
    """Return a note if the killed run had completed a later checkpoint than the one it went on from, else nothing.

    A file counts once it was the same at three steps: a checkpoint may be written in the background. Its content is then
    later than the time at which the one before it was complete.
    """
    seen: list[tuple[int, list[Any]]] = []
    for number, step in enumerate(killed.ranks[0].steps if 0 in killed.ranks else [], 1):
        if step["file"] and (not seen or seen[-1][1] != step["file"]):
            seen.append((number, step["file"]))
    done = [(number, file) for number, file in seen if number + 2 <= killed.steps]
    if len(done) > 1 and start + 1 < done[-2][0] - 1:
        number, (name, *_) = done[-1]
        return f", although {name} was written before step {number}"
    return ""


def exit_codes(whole: Whole, killed: Run, resumed: Run, how: str) -> Verdict:
    if killed.code is None:
        return Verdict("fails", f"after the kill, the other processes did not end in {killed.seconds:.0f} s")
    if killed.code == 0 and killed.steps < whole.steps:
        asked = "SIGTERM" if how == "term" else "the kill"
        return Verdict("fails", f"0 after {asked}, with {killed.steps} of {whole.steps} steps done", killed.steps)
    if resumed.code is not None and resumed.code != whole.run.code:
        return Verdict("fails", f"{resumed.code} instead of {whole.run.code}")
    text = "" if killed.in_grace else "it did not end in the grace time after SIGTERM"
    return Verdict("ok", text or f"{killed.code}, then {resumed.code}")


def pattern(path: str) -> str:
    """Return the path without its numbers: those of steps, times, processes."""
    return "".join("#" if letter.isdigit() else letter for letter in path).replace("##", "#")


def left_behind(whole: Whole, killed: Run, resumed: Run) -> Verdict:
    if processes := killed.left + resumed.left:
        return Verdict("fails", f"processes that still run: {len(processes)}, such as {processes[0]}")
    usual = {pattern(path) for path in whole.run.files}
    more = [path for path in resumed.files if pattern(path) not in usual]
    temporary = [path for path in more if any(word in path.lower() for word in ("tmp", "temp", "part", ".new", "~"))]
    if temporary:
        return Verdict("fails", f"{len(temporary)} temporary files, such as {temporary[0]}")
    return Verdict("ok", f"{len(more)} files more than after the whole run, such as {more[0]}" if more else "")


class Comparison:
    """The steps of a resumed run beside those of the whole one."""

    def __init__(self, whole: Whole, killed: Run, resumed: Run, start: int, known_by: str, other_ranks: bool):
        self.whole, self.killed, self.resumed = whole, killed, resumed
        self.start, self.known_by, self.other_ranks = start, known_by, other_ranks
        self.differs = whole.differs | {
            name: f"the killed run differed from the whole one {where}"
            for name, where in differences_before(whole.run, killed, start).items()
        }

    def verdicts(self) -> dict[str, Verdict]:
        checks = {
            "weights": self.weights, "optimizer state": self.optimizer_state, "learning rates": self.learning_rates,
            "gradient scaler": self.gradient_scaler, "random numbers": self.random_numbers, "samples": self.samples,
            "augmentation": self.augmentation, "losses": self.losses, "evaluations": self.evaluations,
            "final weights": self.final_weights, "number of steps": self.number_of_steps,
        }  # fmt: skip
        result = {}
        for name, check in checks.items():
            depends = "weights" if name in ("final weights", "gradient scaler") else name
            if depends in self.differs and name != "samples":
                result[name] = Verdict("left out", self.differs[depends])
            elif self.other_ranks and name in BITS[2:]:
                result[name] = Verdict("left out", "another number of ranks")
            else:
                result[name] = check()
        same = all(
            result[name].status in ("ok", "not seen") for name in ("samples", "augmentation", "losses", "evaluations")
        )
        if result["random numbers"].status == "fails" and same and result["final weights"].status == "ok":
            text = f"{result['random numbers'].text}; without effect: samples, losses and final weights are the same"
            result["random numbers"] = Verdict("ok", text)
        return result

    def pairs(self) -> Iterator[tuple[int, list[Step], list[Step]]]:
        """Yield each rank with the steps that should be the same."""
        for rank, trace in self.whole.run.ranks.items():
            steps = self.resumed.ranks.get(rank, Trace()).steps
            if not (self.other_ranks and rank):
                yield rank, trace.steps[self.start :], steps

    def first_difference(self, value: Callable[[Step], Any]) -> tuple[int, int, Any, Any] | None:
        """Return the step at which the first rank differs, the rank, and both values."""
        found = []
        for rank, expected, got in self.pairs():
            at = first(value(a) != value(b) for a, b in zip(expected, got, strict=False))
            if at is not None:
                found.append((self.start + at + 1, rank, value(expected[at]), value(got[at])))
        return min(found, key=lambda one: one[:2], default=None)

    def of_rank(self, rank: int) -> str:
        return f"rank {rank}: " if len(self.whole.run.ranks) > 1 else ""

    def restored(self) -> Iterator[tuple[int, int, str, tuple[Any, Any], Step, Step]]:
        """Yield what each optimizer began with: rank, step, key, the expected, its first step in both runs."""
        for rank, _, got in self.pairs():
            steps = self.whole.run.ranks[rank].steps
            states = before_each(steps)
            for step in got:
                if "before" in step:
                    at = next((n for n in range(self.start, len(steps)) if steps[n]["key"] == step["key"]), None)
                    if at is not None:
                        yield rank, at + 1, step["key"], states[at], steps[at], step

    def weights(self) -> Verdict:
        for rank, number, key, expected, its, step in self.restored():
            if step["before"]["weights"] != expected[0]:
                none = f"those of no step of the whole run; {self.known_by} say: before step {number}"
                text = f"not those before step {number}" if self.known_by == "weights" else none
                return Verdict("fails", f"{self.of_rank(rank)}{text} ({key.split()[0]})", number)
            random = states(self.whole.generators)
            same_input = (its["rows"], random(its)) == (step["rows"], random(step))
            if not self.other_ranks and same_input and its["buffers"] != step["buffers"]:
                return Verdict(
                    "fails", f"{self.of_rank(rank)}buffers of the model, such as running means, differ", number
                )
        absent = sorted(set(self.whole.run.ranks) - set(self.resumed.ranks)) if not self.other_ranks else []
        return Verdict("fails", f"ranks {absent} did not train") if absent else Verdict("ok")

    def optimizer_state(self) -> Verdict:
        seen = 0
        for rank, number, key, (_, expected), _, step in self.restored():
            state = step["before"]["state"]
            seen += expected[0]
            if state != expected:
                text = (
                    f"for {state[0]} parameters instead of {expected[0]}" if state[0] != expected[0] else "other values"
                )
                return Verdict("fails", f"{self.of_rank(rank)}{key.split()[0]}: {text}", number)
        return Verdict("ok") if seen else Verdict("not seen", "the optimizer has no state")

    def learning_rates(self) -> Verdict:
        if self.other_ranks and self.start + self.resumed.steps != self.whole.steps:
            return Verdict("left out", "another number of ranks, and of steps")
        if difference := self.first_difference(lambda step: step["lr"]):
            number, rank, expected, got = difference
            return Verdict(
                "fails", f"{self.of_rank(rank)}step {number}: {short(got)} instead of {short(expected)}", number
            )
        if difference := self.first_difference(lambda step: step["options"]):
            return Verdict(
                "fails", f"step {difference[0]}: other options of the optimizer, such as momentum", difference[0]
            )
        return Verdict("ok")

    def gradient_scaler(self) -> Verdict:
        if not any("scale" in step for step in self.whole.run.ranks[0].steps):
            return Verdict("not seen", "no GradScaler is used")
        if difference := self.first_difference(lambda step: step.get("scale")):
            number, rank, expected, got = difference
            return Verdict(
                "fails", f"{self.of_rank(rank)}step {number}: scale and count {got} instead of {expected}", number
            )
        return Verdict("ok")

    def random_numbers(self) -> Verdict:
        drawn = self.whole.generators
        if not drawn:
            return Verdict("not seen", "the program draws from no global generator")
        wrong = {}
        for name in sorted(drawn):
            if difference := self.first_difference(states({name})):
                wrong[name] = difference[0]
        if wrong:
            text = ", ".join(f"{name} from step {number} on" for name, number in wrong.items())
            return Verdict("fails", text, min(wrong.values()))
        return Verdict("ok", ", ".join(sorted(drawn)))

    def samples(self) -> Verdict:
        whole, end = self.whole.run, self.whole.steps
        indexed = all(any(map(has_indices, run.ranks.values())) for run in (whole, self.resumed))
        expected, got = used(whole, 0, end, indexed), used(self.resumed, 0, self.resumed.steps, indexed)
        wanted = total(expected)
        if not wanted:
            return Verdict("not seen", "no sample passed through the arguments of a module")
        seen = total([*used(self.killed, 0, self.start, indexed), *got])
        lost, repeated = (wanted - seen).total(), sum(n for one, n in (seen - wanted).items() if one in wanted)
        unknown = sum(n for one, n in seen.items() if one not in wanted)
        figures = f"of {wanted.total()}, {lost} lost, {repeated} repeated" if lost or repeated or unknown else ""
        if unknown:
            figures += f", {unknown} of content that the whole run never had"
        if "samples" in self.differs or self.other_ranks:
            reason = "another number of ranks" if self.other_ranks else self.differs["samples"]
            if figures and (unknown or self.differs.get("samples", "").startswith("total")):
                return Verdict("left out", reason)
            return (
                Verdict("fails", figures)
                if figures
                else Verdict("ok", f"each as often; their order is left out: {reason}")
            )
        at = first(a != b for a, b in zip(expected[self.start :], got, strict=False))
        if at is not None or figures:
            number = self.start + (at if at is not None else min(len(got), end - self.start)) + 1
            return Verdict("fails", f"{figures or 'each as often, in another order'}, from step {number} on", number)
        return Verdict("ok", f"{wanted.total()}{'' if indexed else ', known by their content'}")

    def augmentation(self) -> Verdict:
        if not has_indices(self.whole.run.ranks[0]):
            return Verdict("not seen", "no DataLoader told the indices of samples")
        changed, compared, number = 0, 0, 0
        for at in range(self.resumed.steps):
            contents = []
            for run, step in ((self.whole.run, self.start + at), (self.resumed, at)):
                rows = [
                    row for trace in run.ranks.values() for one in trace.steps[step : step + 1] for row in one["rows"]
                ]
                contents.append(Counter((index, content) for content, index in rows if index is not None))
            if Counter(i for i, _ in contents[0].elements()) == Counter(i for i, _ in contents[1].elements()):
                compared += contents[0].total()
                differ = (contents[0] - contents[1]).total()
                number = number or (self.start + at + 1 if differ else 0)
                changed += differ
        if changed:
            return Verdict(
                "fails",
                f"other content in {changed} of {compared} uses of the same samples, from step {number} on",
                number,
            )
        return Verdict("ok") if compared else Verdict("not seen", "no step had the same samples")

    def losses(self) -> Verdict:
        if not any(step["loss"] for step in self.whole.run.ranks[0].steps):
            return Verdict("not seen", "no loss was passed to backward()")
        if difference := self.first_difference(lambda step: step["loss"]):
            number, rank, expected, got = difference
            values = [float.fromhex(one[0]) if one else None for one in (got, expected)]
            return Verdict("fails", f"{self.of_rank(rank)}step {number}: {values[0]} instead of {values[1]}", number)
        return Verdict("ok")

    def evaluations(self) -> Verdict:
        compared = 0
        for rank, trace in self.whole.run.ranks.items():
            expected, got = (
                by_step(trace.evaluations, 0),
                by_step(self.resumed.ranks.get(rank, Trace()).evaluations, self.start),
            )
            for number, calls in expected.items():
                # One right after the checkpoint may have been over before it was written.
                if number < self.start or (number == self.start and number not in got):
                    continue
                compared += 1
                if got.get(number) != calls:
                    what = "other results" if number in got else "missing"
                    if number in got and [c[0] for c in got[number]] != [c[0] for c in calls]:
                        what = "other inputs"
                    return Verdict("fails", f"{self.of_rank(rank)}after step {number}: {what}", number)
        return Verdict("ok") if compared else Verdict("not seen", "no evaluation came after the resume")

    def final_weights(self) -> Verdict:
        for rank, _, got in self.pairs():
            last = [{step["key"]: (step["weights"], step["buffers"]) for step in steps} for steps in
                    (self.whole.run.ranks[rank].steps, got)]  # fmt: skip
            # An optimizer that made no step after the resume has nothing to compare.
            if any(last[0].get(key) != value for key, value in last[1].items()):
                return Verdict("fails", f"{self.of_rank(rank)}other bits", self.whole.steps)
        return Verdict("ok")

    def number_of_steps(self) -> Verdict:
        number = self.start + self.resumed.steps
        if number != self.whole.steps and self.other_ranks:
            return Verdict("left out", f"{number} instead of {self.whole.steps}, on another number of ranks")
        return Verdict("ok" if number == self.whole.steps else "fails", f"{number} of {self.whole.steps}", None)


def differences_before(whole: Run, killed: Run, end: int) -> dict[str, str]:
    """Return in what the killed run differed from the whole one before the place from which the program went on."""
    found = {}
    for rank, trace in killed.ranks.items():
        expected = whole.ranks.get(rank, Trace()).steps
        for name, field in (("weights", "weights"), ("losses", "loss")):
            at = first(a[field] != b[field] for a, b in zip(expected[:end], trace.steps, strict=False))
            if at is not None:
                found[name] = f"from step {at + 1} on"
    if "weights" in found:
        found |= {"optimizer state": found["weights"], "evaluations": found["weights"]}
    return found


def by_step(evaluations: Iterable[Step], start: int) -> dict[int, list[tuple[str, str]]]:
    calls: dict[int, list[tuple[str, str]]] = {}
    for line in evaluations:
        calls.setdefault(line["after"] + start, []).append((line["in"], line["out"]))
    return calls


def short(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values[:3])
