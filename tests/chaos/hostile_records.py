"""Records for hvdtrain.report that no run has written: page and tables must come out, or one line must say why not."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

from tests.chaos.attempts import Attempt

REPORT = "python -m hvdtrain.report"
HOST = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\u202e\x1b[2J"


def start(**more: object) -> dict:
    return {
        "event": "start", "time": 1e9, "world_size": 2, "engine": "horovod", "dataset": "digits", "reason": "r", "config": {"lr": 0.1},
        "versions": {"python": "3"}, "ranks": [{"rank": 0, "host": "a", "pid": 1, "device": "cpu"}], "automatic": [],
        "metrics": {"accuracy": {"direction": "max", "percent": True}, "loss": {"direction": "min", "percent": False}},
    } | more  # fmt: skip


def train(step: object, **more: object) -> dict:
    return {
        "event": "train", "time": 1e9 + 1, "epoch": 1, "step": step, "samples": 64, "loss": 1.5, "loss_rank0": 1.4, "learning_rate": 0.1,
        "samples_per_second": 100.0, "loading_seconds": 1e-5, "compute_seconds": 1e-4, "communication_seconds": 1e-5,
    } | more  # fmt: skip


def run_of(*others: dict) -> list[dict]:
    evaluate = {
        "event": "evaluate",
        "time": 1e9 + 3,
        "epoch": 1,
        "step": 9,
        "samples": 640,
        "loss": 1.0,
        "accuracy": 0.9,
        "count": 10,
    }
    return [
        start(),
        *(train(n, time=1e9 + n, samples=64 * n) for n in range(1, 10)),
        *others,
        evaluate,
        {"event": "end", "time": 1e9 + 20},
    ]


def written(lines: Callable[[], bytes | list[dict]], **files: str) -> Callable[[Path], None]:
    def prepare(here: Path) -> None:
        (here / "out").mkdir()
        content = lines()
        if not isinstance(content, bytes):
            content = "".join(json.dumps(line) + "\n" for line in content).encode()
        (here / "out" / "metrics.jsonl").write_bytes(content)
        for name, text in files.items():
            (here / "out" / f"{name}.json").write_text(text)

    return prepare


def page_is_sound(here: Path, output: str) -> str:
    """The page is there, is UTF-8, has no script or handler of the record, and asks no network for anything."""
    page = here / "report" / "report.html"
    if not page.exists():
        return "no page"
    text = page.read_text()
    for bad in ("<script>alert", "<img src=x", 'src="http', "\x1b["):
        if bad in text:
            return f"the page has {bad!r}"
    if (
        re.search(
            r"(?<![\w.])(nan|inf|NaN|Infinity|undefined)(?![\w.])",
            re.sub(r"base64,[^\"]*|<style>.*?</style>", "", text, flags=re.S),
        )
        and "loss" not in text
    ):
        return "the page has nan"
    return ""


def record(
    name: str,
    what: str,
    lines: Callable[[], bytes | list[dict]],
    code: int | tuple[int, ...] = 0,
    says: str = "",
    flags: str = "",
    before: str = "",
    check: Callable[[Path, str], str] | None = page_is_sound,
    limit: float = 120,
    **files: str,
) -> Attempt:
    return Attempt(f"record-{name}", "hostile records", what, f"{before}{REPORT} out --output-dir report {flags}", code, says,
                   prepare=written(lines, **files), check=check if code == 0 and "--csv" not in flags else None, limit=limit)  # fmt: skip


def deep(levels: int) -> dict:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return {"event": "note", "time": 1e9, "x": value}


TABLE = "--csv table.csv"
RECORDS = [
    record("html", "markup and escape codes in every name", lambda: [start(dataset=HOST, engine=HOST, reason=HOST, config={HOST: HOST}, versions={HOST: HOST},
           ranks=[{"rank": 0, "host": HOST, "pid": HOST, "device": HOST}], metrics={HOST: {"direction": "max", "percent": True}}), *run_of()[1:-2],
           {"event": "evaluate", "time": 1e9 + 3, "epoch": 1, "step": 9, "samples": 640, "loss": 1.0, HOST: 0.9},
           {"event": "error", "time": 1e9 + 4, "kind": HOST, "message": HOST}, {"event": "corrupt", "time": 1e9 + 4, "file": HOST, "why": HOST}]),
    record("html-figures", "the same names, figures for a paper", lambda: [start(metrics={"$\\frac{": {"direction": "max", "percent": True}}, dataset="$\\x$ _^"), *run_of()[1:],
           {"event": "evaluate", "time": 1e9 + 3, "epoch": 1, "step": 9, "samples": 640, "loss": 1.0, "$\\frac{": 0.9}], flags="--figures svg,pdf"),
    record("nan", "NaN and infinity in every number", lambda: [start(world_size=2, config={"lr": math.nan}), *(train(n, time=1e9 + n, loss=math.nan, learning_rate=math.inf,
           samples_per_second=math.nan, loading_seconds=-math.inf, compute_seconds=math.nan, communication_seconds=math.nan) for n in range(1, 20)),
           {"event": "evaluate", "time": 1e9, "epoch": 1, "step": 9, "samples": 640, "loss": math.nan, "accuracy": math.inf}]),
    record("huge-numbers", "numbers of 10^300, 10^400 and 5,000 digits", lambda: [start(), *(train(n, time=1e9 + n, loss=1e300 * (-1) ** n, samples_per_second=10**400, learning_rate=1e-320) for n in range(1, 20)),
           {"event": "end", "time": 1e9, "train_seconds": 10**400, "samples": 10**400}]),
    record("digits-5000", "an integer of 5,000 digits, which Python refuses to convert", lambda: "\n".join([json.dumps(start()), json.dumps(train(1)), '{"event": "train", "time": 1e9, "step": 2, "x": '
           + "9" * 5000 + "}", json.dumps(train(3)), ""]).encode()),
    record("missing", "each field is missing in one line", lambda: [{k: v for k, v in start().items() if k != key} for key in start()] + [{k: v for k, v in train(n).items() if k != key} for n, key in enumerate(train(1), 1)]),
    record("null", "each field is null in one line", lambda: [start() | {key: None} for key in start()] + [train(n) | {key: None} for n, key in enumerate(train(1), 1)]),
    record("types", "each field is a list, a dictionary, a string, true", lambda: [event | {key: value} for value in ([], {}, "x", True, [[1]], {"a": {}}) for event in (start(), train(5)) for key in event if key != "event"] + run_of()),
    record("binary", "random bytes", lambda: bytes(range(256)) * 999, (0, 2), check=None),
    record("nul", "NULs, as a file system leaves after a crash", lambda: json.dumps(start()).encode() + b"\n" + bytes(1 << 20) + b"\n" + json.dumps(train(1)).encode() + b"\n"),
    record("utf16", "a record in UTF-16", lambda: json.dumps(start()).encode("utf-16"), 2),
    record("crlf-bom", "a byte order mark and Windows line ends", lambda: b"\xef\xbb\xbf" + "\r\n".join(json.dumps(line) for line in run_of()).encode(), (0, 2), check=None),
    record("line-separators", "U+2028 and U+0085 inside strings", lambda: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [start(dataset="a\u2028b\u0085c\x0bd"), *run_of()[1:]]).encode()),
    record("surrogates", "lone surrogates in names", lambda: [start(dataset="\ud800x", config={"\udfff": "\ud800"}), *run_of()[1:]]),
    record("surrogates-csv", "the same as a table", lambda: [start(dataset="\ud800x", config={"\udfff": "\ud800"}), *run_of()[1:]], flags=TABLE),
    record("deep", "a line of 100,000 brackets", lambda: json.dumps(start()).encode() + b"\n" + b"[" * 100_000 + b"]" * 100_000 + b"\n" + json.dumps(train(1)).encode() + b"\n"),
    record("deep-900", "fields of 900 levels: JSON reads them, others may not", lambda: [start(config={"x": deep(900)["x"]}), deep(900), *run_of()[1:]]),
    record("long-line", "a line of 5 MB", lambda: [start(reason="x" * 5_000_000), *run_of()[1:]]),
    record("many-lines", "200,000 lines", lambda: json.dumps(start()).encode() + b"\n" + b"".join(json.dumps({"event": "train", "time": 1e9 + n, "step": n, "samples": n, "loss": 1.0}).encode() + b"\n"
           for n in range(200_000)), limit=240),
    record("many-metrics", "a hundred metrics with directions", lambda: [start(metrics={f"m{n}": {"direction": "max", "percent": False} for n in range(100)}), *run_of()[1:],
           {"event": "evaluate", "time": 1e9 + 3, "epoch": 1, "step": 9, "samples": 640, "loss": 1.0} | {f"m{n}": 0.5 for n in range(100)}], (0, 2), limit=240),
    record("many-ranks", "10,000 ranks in a line", lambda: [start(world_size=10_000, ranks=[{"rank": n, "host": f"h{n}", "pid": 1, "device": "cpu"} for n in range(10_000)]), *run_of()[1:]]),
    record("many-resumes", "two hundred starts and resumes", lambda: [line for n in range(200) for line in (start(time=1e9 + 9 * n), {"event": "resume", "time": 1e9 + 9 * n, "step": n, "samples": 64 * n, "taken": 0},
           train(n + 1, time=1e9 + 9 * n + 2, samples=64 * n + 64))]),
    record("backwards", "time, steps and samples go backwards", lambda: [start(), *(train(n, time=1e9 - n, samples=64 * n) for n in range(50, 0, -1))]),
    record("same-time", "every line at the same time and step", lambda: [start(), *(train(1) for _ in range(50))]),
    record("far-times", "times in the years -250,000 and 250,000", lambda: [start(time=-8e12), *(train(n, time=8e12 + n) for n in range(1, 9))]),
    record("only-start", "only a start", lambda: [start()]),
    record("empty", "an empty record", lambda: b"", 2),
    record("no-start", "steps without a start", lambda: run_of()[1:], (0, 2), check=None),
    record("summary-hostile", "summary.json with markup, NaN, lists", lambda: run_of(), summary=json.dumps({"dataset": HOST, "test_accuracy": [1], "train_seconds": math.nan, "samples_per_second": "x",
           "parameters_sha256": HOST, HOST: HOST, "steps": 10**400})),
    record("summary-list", "summary.json is a list, mistakes.json a string", lambda: run_of(), summary="[]", mistakes='"x"'),
    record("mistakes-bomb", "mistakes.json with a shape of a million by a million", lambda: run_of(), mistakes=json.dumps({"time": 2e9, "shape": [10**6, 10**6], "confusion": [[1, 0], [0, 1]], "mistakes": []})),
    record("mistakes-classes", "a confusion matrix of 2,000 classes", lambda: run_of(), mistakes=json.dumps({"time": 2e9, "shape": [1, 1], "confusion": [[1] * 2000] * 2000, "mistakes": []}), limit=240),
    record("mistakes-wide", "an image of 1 x 200,000 pixels", lambda: run_of(), mistakes=json.dumps({"time": 2e9, "shape": [1, 200_000], "confusion": [[1, 1], [0, 1]], "mistakes": [
           {"index": 0, "label": 0, "predicted": 1, "loss": 1e308, "pixels": "AAAA" * (200_000 // 3) + "AAA="}]})),
    Attempt("record-pipe", "hostile records", "metrics.jsonl and summary.json are FIFOs", f"mkdir out; mkfifo out/metrics.jsonl out/summary.json; {REPORT} out", 2, "pipe", limit=60),
    Attempt("record-zero", "hostile records", "metrics.jsonl is a link to /dev/zero", f"mkdir out; ln -s /dev/zero out/metrics.jsonl; {REPORT} out", 2, "metrics.jsonl", limit=60),
    Attempt("record-directory", "hostile records", "metrics.jsonl is a directory", f"mkdir -p out/metrics.jsonl; {REPORT} out", 2, "metrics.jsonl"),
    Attempt("record-same-run-twice", "hostile records", "the same run twice, by a link, and 60 runs", f"ln -s out o2; for i in $(seq 60); do cp -r out r$i; done; {REPORT} out o2 out/ ./out r* --output-dir report",
            0, prepare=written(run_of), check=page_is_sound, limit=240),
    Attempt("record-odd-names", "hostile records", "directories called <b>, $x$, a line break, not UTF-8, -x", "for d in '<b>x' '$\\frac$' $'a\\nb' $'\\xff' ' -x'; do cp -r out \"$d\"; done; "
            f"{REPORT} --output-dir report -- '<b>x' '$\\frac$' $'a\\nb' $'\\xff' ' -x'", 0, prepare=written(run_of), check=page_is_sound),
    Attempt("record-csv-formulas", "hostile records", "names that a spreadsheet would execute, as a table", f"{REPORT} out {TABLE}; cat table.csv", 0, unsaid=r"(?m)(^|,)\"?[=@]|Traceback",
            prepare=written(lambda: [start(dataset="=cmd|' /C calc'!A0", config={"=1+1": "@SUM(1)"}), *run_of()[1:]])),
    Attempt("report-full-disk", "hostile records", "no room for the page", f"mkdir report; exec unshare -m bash -c 'mount -t tmpfs -o size=16k tmpfs report; {REPORT} out --output-dir report'", 2, "No space left",
            prepare=written(run_of), needs=("root",)),
    Attempt("report-output-is-link", "hostile records", "report.html is a link to a file of the user", f"mkdir report; echo mine > mine; ln -s ../mine report/report.html; {REPORT} out --output-dir report; cat mine", 0,
            "mine", prepare=written(run_of)),
    Attempt("report-no-home", "hostile records", "no HOME, MPLCONFIGDIR below /proc", f"unset HOME; MPLCONFIGDIR=/proc/x {REPORT} out --output-dir report", 0, prepare=written(run_of), check=page_is_sound),
    Attempt("report-display", "hostile records", "MPLBACKEND=TkAgg without a display, an odd matplotlibrc", f"echo 'axes.prop_cycle: nonsense' > matplotlibrc; MPLBACKEND=TkAgg DISPLAY=:99 {REPORT} out --output-dir report", 0,
            prepare=written(run_of), check=page_is_sound),
]  # fmt: skip
