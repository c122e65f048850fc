"""`hvdtrain NAME` beside `python -m hvdtrain.NAME`: the same, as fast; help by purpose, completion in a shell."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain import __main__ as console
from hvdtrain import audit, report

PACKAGE = Path(hvdtrain.__file__).parent
SCRIPT = Path(sys.executable).parent / "hvdtrain"
NAMES = [name for names in console.by_purpose().values() for name in names]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=120)


def called(monkeypatch, capsys, *words: str) -> tuple[object, str, str]:
    """Return exit code, output and errors of `hvdtrain WORDS` in this process."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/hvdtrain", *words])
    try:
        code: object = console.main()
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


def test_every_command_has_its_purpose_and_a_line_of_help(monkeypatch, capsys):
    ending = re.compile(r'^if __name__ == "__main__":\n    ((exit_codes\.)?run|sys\.exit)\(', re.MULTILINE)
    found = {path for path in PACKAGE.rglob("*.py") if ending.search(path.read_text()) and path.name != "__main__.py"}
    found -= {PACKAGE / "launching/forker.py"}  # which commands start
    assert {console.source_of(name) for name in NAMES} >= found
    code, said, _ = called(monkeypatch, capsys, "--help")
    assert code == 0
    lines = {line.split()[0]: line for line in said.splitlines() if line.startswith("  ")}
    assert list(lines) == NAMES
    for name, module in (("report", report), ("audit", audit)):
        assert lines[name].endswith((module.__doc__ or "").splitlines()[0])
    assert called(monkeypatch, capsys) == (0, said, "")


def test_the_version_and_a_name_that_is_none(monkeypatch, capsys):
    assert called(monkeypatch, capsys, "--version") == (0, f"{hvdtrain.__version__}\n", "")
    for word in ("mnits", "--completion", "cli"):
        code, said, error = called(monkeypatch, capsys, word)
        assert (code, said, error) == (2, "", f"hvdtrain: error: {word} is not a command: --help lists them\n")


def test_it_does_what_the_module_does(tmp_path):
    module = [sys.executable, "-m", "hvdtrain.report"]
    same = [[*module], [sys.executable, "-m", "hvdtrain", "report"]]
    same += [[SCRIPT, "report"]] if SCRIPT.exists() else []  # an environment that was set up before there was one
    for words in (["--help"], [tmp_path / "none", "--output-dir", tmp_path]):
        results = [run(*start, *words) for start in same]
        assert len({(each.returncode, each.stdout, each.stderr) for each in results}) == 1, results
    assert results[0].returncode == 2


@pytest.mark.skipif(not SCRIPT.exists(), reason="an environment that was set up before there was a script")
@pytest.mark.parametrize("name", ["starter", "tuned"])
def test_a_module_of_the_working_directory_is_found(name, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("print('runs')")
    monkeypatch.chdir(tmp_path)
    done = run(SCRIPT, name, "-m", "mine")
    assert (done.returncode, done.stdout) == (0, "runs\n"), done


def test_it_starts_as_fast_as_the_module():
    """Nothing is imported for it that `python -m` does not import, but its own file."""
    shows = "import sys; before = set(sys.modules); {}; print(*sorted(set(sys.modules) - before))"
    needed = run(sys.executable, "-c", shows.format("import runpy, pathlib, typing")).stdout.split()
    loaded = run(sys.executable, "-c", shows.format("import hvdtrain.__main__")).stdout.split()
    assert set(loaded) - set(needed) == {"hvdtrain", "hvdtrain.__main__"}


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "hvdtrain"
    path.write_text(console.completion("bash"))
    return path


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["rep"], {"report"}),
        (["mnist", "--engine", ""], {"auto", "horovod", "ddp", "dataparallel", "serial"}),
        (["mnist", "--track", "w"], {"wandb"}),
        (["mnist", "--mirror"], {"--mirror", "--mirror-timeout"}),
        (["mnist", "--debug"], set()),
        (["report", "--out"], {"--output-dir"}),
        (["report", "/et"], {"/etc"}),
    ],
)
def test_completion_is_that_of_the_parsers(words, completed, script):
    """In a real bash."""
    asks = f'source {script}; COMP_WORDS=(hvdtrain "$@"); COMP_CWORD=$#; _hvdtrain; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = run("bash", "-c", asks, "bash", *words)
    assert done.stderr == ""
    assert set(done.stdout.split()) == completed
    assert console.completion("zsh").startswith("autoload") or words != ["rep"]
