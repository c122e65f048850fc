"""launch/horovodrun.sh and launch/mpirun.sh: what they would run, compared word by word, and then run."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launchers import BIN, MARK, ROOT, Done, environment, kill, launch, new_job

HOSTILE = 'it\'s $(touch owned) "a" `id`\n;b'
VERSIONS = {
    "openmpi4": "mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/",
    "openmpi5": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/",
    "mpich": "HYDRA build details:\n    Version:   5.0.2\n    Process Manager:   pmi",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929\nCopyright 2003-2026, Intel Corporation.",
}
BARE = {"PATH": "{bin}:/usr/bin:/bin", "HOME": "/tmp", "CANARY_TOKEN": "s3cret"}


def program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def wrapper(name: str, *arguments: str, launch_dir: Path = ROOT / "launch", timeout: float = 100, **options) -> Done:
    job = new_job()
    env = {**options.pop("env", environment()), MARK: job}
    process = subprocess.Popen(
        [launch_dir / f"{name}.sh", *arguments], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, **options,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        kill(job)
    return Done(process.returncode, stdout, stderr, 0.0)


@pytest.fixture(params=VERSIONS)
def some_mpi(request, tmp_path) -> dict[str, str]:
    """An environment of three variables, whose mpirun says only its version."""
    (tmp_path / "bin").mkdir()
    program(
        tmp_path / "bin" / "mpirun", f"[ $# = 1 ] && [ $1 = --version ] && cat <<'END'\n{VERSIONS[request.param]}\nEND"
    )
    return {name: value.format(bin=tmp_path / "bin") for name, value in BARE.items()} | {"kind": request.param}


def dry(name: str, *arguments: str, env: dict[str, str]) -> str:
    done = wrapper(name, *arguments, env=env | {"DRY_RUN": "1"})
    assert (done.code, done.stderr) == (0, ""), done
    return done.stdout


# `env -u` takes away what is not on the list (MARK is, by its prefix); names only, no value of the caller's stands here.
CLEAN = "env -u CANARY_TOKEN -u kind "
X = "-x HOME -x HVDTRAIN_TEST_JOB -x PATH "
LIST = "-genvlist HOME,HVDTRAIN_TEST_JOB,PATH "
ONE_HOST = {
    "openmpi4": CLEAN + "mpirun -np 8 --bind-to none --map-by slot --mca btl ^tcp,ofi " + X,
    "openmpi5": CLEAN + "mpirun -np 8 --bind-to none --map-by slot --mca btl ^tcp,ofi " + X,
    "mpich": CLEAN + "mpirun -np 8 -bind-to none " + LIST,
    "intel": CLEAN + "mpirun -np 8 " + LIST,
}
SETTINGS = {"NCCL_SOCKET_IFNAME": "eth0", "HOROVOD_FUSION_THRESHOLD": "33554432", "HOROVOD_CYCLE_TIME": "0.5"}
SETTINGS |= {"HOROVOD_TIMELINE": "a b.json", "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "tries.csv"}
MANY = "-H a:4,b:4 --interface eth0 --fusion-mb 32 --cycle-ms 0.5 --timeline 'a b.json' --autotune tries.csv"
# Between hosts by its path: Open MPI then looks for itself in the same place on every one of them.
OPEN_MPI = CLEAN + "{mpirun} -np 8 -H a:4,b:4 --bind-to none --map-by slot --mca btl_tcp_if_include eth0 "
SSH = "-o ConnectTimeout=20 -o ServerAliveInterval=30 -o ServerAliveCountMax=20"
AGENT = f"--mca plm_rsh_agent 'timeout --foreground 600 ssh -x {SSH}' "
EXTRA, INTELS_EXTRA = (
    CLEAN + f"env '{name}={SSH}' " for name in ("HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")
)
TWO_HOSTS = {
    "openmpi4": OPEN_MPI + "--mca oob_tcp_if_include eth0 " + AGENT + X,
    "openmpi5": OPEN_MPI + "--prtemca oob_tcp_if_include eth0 " + AGENT + X,
    "mpich": EXTRA + "mpirun -np 8 -hosts a,b -ppn 4 -iface eth0 -bind-to none " + LIST,
    "intel": INTELS_EXTRA + "mpirun -np 8 -hosts a,b -ppn 4 -iface eth0 " + LIST,
}  # fmt: skip


def settings(kind: str, values: dict[str, str]) -> list[str]:
    if kind.startswith("openmpi"):
        return [word for name, value in values.items() for word in ("-x", f"{name}={value}")]
    return [word for name, value in values.items() for word in ("-genv", name, value)]


def two_hosts(env: dict[str, str]) -> list[str]:
    return shlex.split(TWO_HOSTS[env["kind"]].format(mpirun=shutil.which("mpirun", path=env["PATH"])))


def test_mpirun_on_one_host(some_mpi):
    printed = dry("mpirun", "-np", "8", "python", "-m", "hvdtrain.mnist", "--epochs", "2", env=some_mpi)
    assert shlex.split(printed) == shlex.split(ONE_HOST[some_mpi["kind"]] + "python -m hvdtrain.mnist --epochs 2")


def test_mpirun_on_two_hosts_over_mpi(some_mpi):
    printed = dry("mpirun", *shlex.split(MANY), "--transport", "mpi", "python", "-m", "hvdtrain.mnist", env=some_mpi)
    kind = some_mpi["kind"]
    tuned = settings(kind, {"HOROVOD_CPU_OPERATIONS": "mpi", **SETTINGS})
    assert shlex.split(printed) == [*two_hosts(some_mpi), *tuned, "python", "-m", "hvdtrain.mnist"]


def test_mpirun_between_hosts_takes_gloo_through_the_starter(some_mpi):
    printed = dry("mpirun", *shlex.split(MANY), "python", "-m", "hvdtrain.mnist", env=some_mpi)
    kind = some_mpi["kind"]
    tuned = settings(kind, {"MASTER_ADDR": "a", "MASTER_PORT": "9000", **SETTINGS})
    program = shlex.split("python -m hvdtrain.starter --interface eth0 -m hvdtrain.mnist")
    assert shlex.split(printed) == [*two_hosts(some_mpi), *tuned, *program]
    printed = dry("mpirun", *shlex.split(MANY), "python", "train.py", env=some_mpi)
    program = shlex.split("python -P -m hvdtrain.starter --interface eth0 train.py")
    assert shlex.split(printed) == [*two_hosts(some_mpi), *tuned, *program]


def test_horovodrun():
    env = BARE | {"PATH": "/usr/bin:/bin"}
    one = dry("horovodrun", "-np", "8", "python", "-m", "hvdtrain.mnist", env=env)
    assert one == "env -u CANARY_TOKEN horovodrun -np 8 python -m hvdtrain.mnist\n"
    tuned = "--fusion-threshold-mb 32 --cycle-time-ms 0.5 --timeline-filename 'a b.json' "
    tuned += "--autotune --autotune-log-file tries.csv "
    printed = dry("horovodrun", *shlex.split(MANY), "--", "python", "-m", "hvdtrain.mnist", env=env)
    two = f"env -u CANARY_TOKEN horovodrun -np 8 -H a:4,b:4 --gloo --network-interfaces eth0 {tuned}"
    assert shlex.split(printed) == shlex.split(two + "python -m hvdtrain.mnist")


PASSED = """
    http_proxy=http://proxy:3128 https_proxy=proxy:3128 no_proxy=localhost,@all SSL_CERT_FILE=/ca REQUESTS_CA_BUNDLE=/ca
    TORCH_HOME=/cache HF_HOME=/cache CUDA_LAUNCH_BLOCKING=1 NCCL_DEBUG=INFO UCX_TLS=ib FI_PROVIDER=cxi TRITON_CACHE_DIR=/c
    PYTORCH_CUDA_ALLOC_CONF=x TORCH_LOGS=x CUBLAS_WORKSPACE_CONFIG=:4096:8 ROCR_VISIBLE_DEVICES=0 MIOPEN_DEBUG=x CCL_ATL=ofi
    HIP_VISIBLE_DEVICES=0 HSA_XNACK=1 SLURM_JOB_ID=7 HOROVOD_CYCLE_TIME=1 NVIDIA_TF32_OVERRIDE=0
"""
SECRET = """
    SLURM_JWT=eyJ HOROVOD_SECRET_KEY=k HF_TOKEN=hf_ WANDB_API_KEY=k AWS_SECRET_ACCESS_KEY=k TORCH_API_KEY=k NCCL_PASSWORD=p
    http_proxy=http://user:s3cret@proxy:3128 HTTPS_PROXY=user:s3cret@proxy
"""


@pytest.mark.parametrize("given", ["", "0123456789abcdef"])
def test_the_secret_of_starters_on_several_hosts_is_passed_by_its_name(given, tmp_path):
    version = "[ $1 = --version ] && echo 'mpirun (Open MPI) 4.1.8' && exit"
    program(tmp_path / "mpirun", f'{version}; echo "$@"; echo "secret: $HVDTRAIN_JOB_SECRET"')
    program(tmp_path / "ssh", "exit")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **({"HVDTRAIN_JOB_SECRET": given} if given else {})}
    asked = [
        *["--transport", "gloo", "-np", "2", "-H", "a:1,b:1", "--interface", "eth0", "--"],
        "python",
        "-m",
        "hvdtrain.mnist",
    ]
    done = wrapper("mpirun", *asked, env=env)
    typed, secret = done.stdout.strip().splitlines()
    secret = secret.removeprefix("secret: ")
    assert "-x HVDTRAIN_JOB_SECRET " in typed
    assert secret == given if given else len(secret) == 64
    assert secret not in typed


@pytest.mark.parametrize("name", ["mpirun", "horovodrun"])
@pytest.mark.parametrize("settings", [PASSED, SECRET], ids=["passed", "secret"])
def test_what_sites_need_is_passed_and_no_secret(name, settings, tmp_path):
    around = dict(setting.split("=", 1) for setting in settings.split())
    program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DRY_RUN": "1"} | around
    done = wrapper(name, "-np", "2", "true", env=env)
    words = done.stdout.split()

    def after(option: str) -> set[str]:
        return {word for before, word in itertools.pairwise(words) if before == option} & set(around)

    assert done.code == 0, done
    assert after("-u") == (set(around) if settings is SECRET else set())
    if name == "mpirun":
        own_host = {  # ranks here inherit these from mpirun
            variable for variable in around if variable.endswith("VISIBLE_DEVICES") or variable.startswith("SLURM_")
        }
        assert after("-x") == (set(around) - own_host if settings is PASSED else set())
    assert not [value for value in around.values() if value in words]
    hidden = "holds a password and is not passed on; to pass it: --pass"
    said = {f"{name}.sh: {variable} {hidden} {variable}" for variable, value in around.items() if "@proxy" in value}
    assert set(done.stderr.splitlines()) == said
    anyway = [word for variable in around for word in ("--pass", variable)]
    done = wrapper(name, "-np", "2", *anyway, "true", env=env)
    words = done.stdout.split()
    assert (done.code, done.stderr, after("-u")) == (0, "", set())


@pytest.mark.parametrize("name", ["mpirun", "horovodrun"])
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("-np 2", "nothing to run: end with, for example, python -m hvdtrain.mnist"),
        ("-np zwei true", "-np zwei: not a whole number of at least 1"),
        ("-np", "-np needs a value"),
        ("--fast true", "unknown option --fast"),
        ("-np 9 -H a:4,b:4 --interface eth0 true", "-np 9, but -H a:4,b:4 has 8 slots"),
        ("-H '-oProxyCommand=id' true", "-H -oProxyCommand=id: write names and slots"),
        ("-H 'a:4;id' true", "write names and slots"),
        ("-H a:4,b:4 python -V", "-H a:4,b:4 needs --interface NAME"),
        ("--interface 'eth0 -x' -np 2 true", "not the name of an interface"),
        ("--pass TOKEN=1 -np 2 true", "--pass TOKEN=1: give the name of a variable, not its value"),
        ("--start-timeout 1.5 -np 2 true", "--start-timeout 1.5: not a whole number of seconds"),
        ("--restarts 08 -np 2 true", "--restarts 08: not a whole number"),
        ("--fusion-mb 010 -np 2 true", "--fusion-mb 010: not a whole number"),
        ("--transport tcp -np 2 true", "--transport tcp: choose auto, mpi or gloo"),
        ("--cycle-ms 1ms -np 2 true", "--cycle-ms 1ms: not a number"),
        ("--port 80 -np 2 true", "--port 80: not a port"),
    ],
)  # fmt: skip
def test_refused_in_one_line_with_code_two(name, arguments, complaint):
    done = wrapper(name, *shlex.split(arguments))
    assert (done.code, done.stdout) == (2, ""), done
    assert done.stderr.startswith(f"{name}.sh: error: "), done
    assert complaint in done.stderr, done
    assert done.stderr.count("\n") == 1, done


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's id: needs root")
def test_a_user_id_without_a_name_needs_a_home():
    """mpirun ends in a segmentation fault there."""
    words = ["setpriv", "--reuid=4242424", "--regid=4242424", "--clear-groups", "env", "-u", "HOME"]
    words += ["bash", "-c", (ROOT / "launch" / "options.sh").read_text()]  # that user may not read the checkout
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done
    assert "error: HOME is not set, and this user id has no name: mpirun would crash" in done.stderr


def test_refused_for_one_launcher_only():
    many = ("-H", "a:4,b:4", "--interface", "eth0")
    assert "use mpirun.sh" in wrapper("horovodrun", *many, "--transport", "mpi", "true").stderr
    assert "--transport gloo starts Python programs" in wrapper("mpirun", *many, "true").stderr
    nowhere = environment() | {"PATH": "/usr/bin:/bin"}
    for name in ("mpirun", "horovodrun"):  # as from cron; the latter was started again, "exec: horovodrun: not found"
        if shutil.which(name, path=nowhere["PATH"]) is None:
            done = wrapper(name, "-np", "2", "--restarts", "1", "true", env=nowhere)
            assert (done.code, done.stderr.count("\n")) == (2, 1), done
            assert f"{name}.sh: error: no {name} on PATH: activate the environment" in done.stderr


CASES = {
    "mpirun": ("mpirun",), "mpirun over Gloo": ("mpirun", "--transport", "gloo"),
    "horovodrun": ("horovodrun",), "horovodrun over Gloo": ("horovodrun", "--transport", "gloo"),
}  # fmt: skip


# Each rank writes its arguments, directory and environment to a file of its own.
SHOW = """
import json, os, sys
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
open(sys.argv[1] + rank, "w").write(json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]))
"""
OF_ONE_START = ("OMPI_", "PMIX_", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_SECRET_KEY", MARK, "SHLVL", "OLDPWD", "_")


@pytest.mark.parametrize("case", CASES)
def test_what_is_printed_is_what_runs_and_hostile_names_arrive_as_they_are(case, tmp_path):
    """A checkout, a working directory and arguments full of quotes: nothing is split, nothing is run."""
    name, *options = CASES[case]
    here = tmp_path / HOSTILE
    shutil.copytree(ROOT / "launch", here / "launch")
    (here / "show.py").write_text(SHOW)
    arguments, words = ["-np", "2", *options, "--timeline", HOSTILE, sys.executable, "show.py"], [HOSTILE, "*", ""]
    ran = wrapper(name, *arguments, "ran", *words, launch_dir=here / "launch", cwd=here)
    line = dry(name, *arguments, "pasted", *words, env=environment())
    pasted = launch(shlex.join(["bash", "-c", line]), cwd=here)
    assert (ran.code, pasted.code) == (0, 0), (ran, pasted)
    for rank in ("0", "1"):
        shown = []
        for how in ("ran", "pasted"):
            argv, directory, variables = json.loads((here / f"{how}{rank}").read_text())
            assert (argv, directory, variables["HOROVOD_TIMELINE"]) == (words, str(here), HOSTILE)
            assert (variables.get("HOROVOD_CONTROLLER") == "gloo") == bool(options)
            assert ("OMPI_COMM_WORLD_SIZE" in variables) == (case != "horovodrun over Gloo")
            shown.append({key: value for key, value in variables.items() if not key.startswith(OF_ONE_START)})
        assert shown[0] == shown[1]
    assert sorted(path.name for path in here.iterdir()) == ["launch", "pasted0", "pasted1", "ran0", "ran1", "show.py"]


def test_only_named_variables_reach_the_ranks():
    env = environment(CANARY_TOKEN="s3cret", WANTED="yes", HOROVOD_CYCLE_TIME="0.7", OMP_NUM_THREADS="1")
    show = "import os; print({k: os.environ.get(k) for k in ('CANARY_TOKEN', 'WANTED', 'HOROVOD_CYCLE_TIME')})"
    for name in ("mpirun", "horovodrun"):
        done = wrapper(name, "-np", "2", "--pass", "WANTED", "--", sys.executable, "-c", show, env=env)
        assert done.code == 0, done
        assert done.stdout.count("{'CANARY_TOKEN': None, 'WANTED': 'yes', 'HOROVOD_CYCLE_TIME': '0.7'}") == 2, done


OTHERS = [Path(place) for place in os.environ.get("HVDTRAIN_TEST_MPIRUNS", "").split(os.pathsep) if place]


@pytest.mark.skipif(not OTHERS, reason="no other MPI named: HVDTRAIN_TEST_MPIRUNS=DIR:DIR, each with a bin/mpirun")
@pytest.mark.parametrize("place", OTHERS, ids=str)
def test_other_mpis_start_ranks_with_these_options(place):
    """Horovod here is built for one MPI; of the others, the launcher alone is tried: ranks, settings, environment."""
    env = environment(CANARY_TOKEN="s3cret") | {
        "PATH": f"{place / 'bin'}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
    }
    show = (
        "import os; e = os.environ; print(e.get('PMI_RANK', e.get('OMPI_COMM_WORLD_RANK')), e['HOROVOD_CYCLE_TIME'], "
    )
    show += "e.get('CANARY_TOKEN'))"
    done = wrapper("mpirun", "-np", "2", "--cycle-ms", "0.3", "--", sys.executable, "-c", show, env=env, timeout=30)
    assert done.code == 0, done
    assert sorted(done.stdout.split("\n")) == ["", "0 0.3 None", "1 0.3 None"]


ONE_FORKER = "python -m hvdtrain.starter --local-ranks"
SITE_SCRIPTS = {  # by name: the file, what is edited, variables; the beginning and the end of the printed command
    "slurm, pyxis": (
        "slurm.sbatch", {"how=starter": "how=forked", "image=''": "image=/images/hvdtrain.sqsh"},
        {"SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "8", "SCRATCH": "/scratch/me"},
        "srun --mpi=none --ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 --wait=60 --kill-on-bad-exit=0 "
        "--container-image=/images/hvdtrain.sqsh "
        "--container-mounts=/scratch/me:/scratch/me,{home}/hvdtrain/runs/0:{home}/hvdtrain/runs/0 "
        f"{ONE_FORKER} 4 -m hvdtrain.mnist --output-dir {{home}}/hvdtrain/runs/0 --no-progress",
    ),
    "slurm, an image of a registry": (
        "slurm.sbatch", {"image=''": "image='registry.example.org#hvdtrain:1'"}, {},
        "srun --mpi=none --wait=60 --kill-on-bad-exit=0 '--container-image=registry.example.org#hvdtrain:1' "
        "--container-mounts=/scratch:/scratch,{home}/hvdtrain/runs/0:{home}/hvdtrain/runs/0 "
        "python -m hvdtrain.starter -m hvdtrain.mnist --output-dir {home}/hvdtrain/runs/0 --no-progress",
    ),
    "pbs, unedited": (
        "job.pbs", {}, {},
        "mpiexec -n 1 --ppn 1 --depth 32 --cpu-bind depth --env MASTER_ADDR=localhost --env MASTER_PORT=20000 "
        f"{ONE_FORKER} 4 -m hvdtrain.mnist --output-dir {{home}}/hvdtrain/runs/0 --no-progress",
    ),
    "pbs, two hosts": (  # PBS names a host once for each rank, and has a name behind the number
        "job.pbs", {"image=''": "image=/images/hvdtrain.sif"},
        {"PBS_NODEFILE": "{home}/nodes", "PBS_JOBID": "1234567.polaris-pbs-01"},
        "mpiexec -n 2 --ppn 1 --depth 32 --cpu-bind depth --env MASTER_ADDR=x3004c0s7b0n0 --env MASTER_PORT=24567 "
        f"apptainer exec --nv --bind /tmp /images/hvdtrain.sif {ONE_FORKER} 4 -m hvdtrain.mnist "
        "--output-dir {home}/hvdtrain/runs/1234567.polaris-pbs-01 --no-progress",
    ),
    "pbs, the site's MPI": (
        "job.pbs", {"how=forked": "how=mpi"}, {"PBS_NODEFILE": "{home}/nodes", "PBS_JOBID": "0000009.a"},
        "mpiexec -n 8 --ppn 4 --depth 8 --cpu-bind depth "
        "python -m hvdtrain.mnist --output-dir {home}/hvdtrain/runs/0000009.a --no-progress",
    ),
    "flux, unedited": (
        "job.flux", {}, {},
        "flux run --nodes=1 --ntasks=1 --exclusive --env=MASTER_ADDR=localhost --env=MASTER_PORT=20123 "
        f"{ONE_FORKER} 4 -m hvdtrain.mnist --output-dir {{home}}/hvdtrain/runs/hvdtrain --no-progress",
    ),
    "flux, two hosts": (
        "job.flux", {"ranks=4": "ranks=8"}, {"PATH": "{home}/bin:/usr/bin:/bin"},
        "flux run --nodes=2 --ntasks=2 --exclusive --env=MASTER_ADDR=tuolumne7 --env=MASTER_PORT=20123 "
        f"{ONE_FORKER} 8 -m hvdtrain.mnist --output-dir {{home}}/hvdtrain/runs/hvdtrain --no-progress",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SITE_SCRIPTS)
def test_a_sites_script_prints_its_command(case, tmp_path):
    """Only lines that are marked EDIT are edited."""
    name, edits, variables, expected = SITE_SCRIPTS[case]
    (tmp_path / "nodes").write_text("x3004c0s7b0n0\n\nx3004c0s7b1n0\r\n" * 2)  # in turn
    (tmp_path / "bin").mkdir()
    program(
        tmp_path / "bin" / "flux", 'case $* in *--count*) echo 2 ;; "hostlist --nth=0 local") echo tuolumne7 ;; esac'
    )
    lines = (ROOT / "launch" / name).read_text().splitlines(keepends=True)
    for before, after in edits.items():
        (number,) = [number for number, line in enumerate(lines) if line.startswith(before)]
        assert "EDIT" in lines[number]
        lines[number] = lines[number].replace(before, after)
    (tmp_path / name).write_text("".join(lines))
    env = {"PATH": "/usr/bin:/bin", "HOME": "{home}", "DRY_RUN": "1"} | variables
    env = {key: value.format(home=tmp_path) for key, value in env.items()}
    done = subprocess.run(["bash", tmp_path / name], cwd="/", env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert shlex.split(done.stdout) == shlex.split(expected.format(home=tmp_path))


@pytest.mark.parametrize(
    ("name", "edits", "line"),
    [
        ("slurm.sbatch", {"how=starter": "how=x"},
            "slurm.sbatch: error: how=x: choose starter, forked, torchrun, pmix or mpirun"),
        ("slurm.sbatch", {"how=starter": "how=mpirun", "image=''": "image=/a.sqsh"},
            "slurm.sbatch: error: pyxis starts containers from srun: choose how=starter, forked or pmix"),
        ("job.pbs", {"how=forked": "how=x"}, "job.pbs: error: how=x: choose forked or mpi"),
        ("job.pbs", {"hosts=(localhost)": "PBS_NODEFILE=/none; hosts=(localhost)"},
            "job.pbs: error: PBS_NODEFILE=/none names no host: submit this file with qsub"),
        ("job.flux", {}, "job.flux: error: no flux on PATH: submit this file with flux batch"),
    ],
)  # fmt: skip
def test_a_sites_script_refuses_in_one_line(name, edits, line, tmp_path):
    text = (ROOT / "launch" / name).read_text()
    for before, after in edits.items():
        text = re.sub(rf"\n{re.escape(before)}(?=\s)", lambda _, after=after: f"\n{after}", text)
    (tmp_path / name).write_text(text)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)} | ({"DRY_RUN": "1"} if edits else {})
    done = subprocess.run(["bash", tmp_path / name], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")


@pytest.mark.parametrize("name", ["slurm.sbatch", "job.pbs", "job.flux"])
def test_a_sites_script_does_not_train_without_a_module_that_it_cannot_load(name, tmp_path):
    venv = tmp_path / "hvdtrain" / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "activate").touch()
    (tmp_path / name).write_text((ROOT / "launch" / name).read_text().replace("\nmodules=''", "\nmodules='gone'"))
    for started in ("srun", "mpiexec", "flux"):
        program(tmp_path / started, "echo trained")
    lmod = 'module() { echo "no module $2" >&2; return 1; }; export -f module; exec bash "$0"'
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    command = ["bash", "-c", lmod, tmp_path / name]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no module gone\n"), done


@pytest.mark.parametrize(
    ("how", "start"),
    [
        ("starter", "srun --mpi=none --wait=60 --kill-on-bad-exit=0 python -m hvdtrain.starter -m hvdtrain.mnist"),
        ("forked", "srun --mpi=none --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1"),
        ("pmix", "srun --mpi=pmix --wait=60 --kill-on-bad-exit=0 python -m hvdtrain.mnist"),
        ("torchrun", "srun --mpi=none --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1"),
        ("mpirun", "launch/mpirun.sh -H localhost:1 --transport mpi -- python -m hvdtrain.mnist"),
    ],
)
def test_slurms_script_prints_its_command_unedited_and_anywhere(how, start, tmp_path):
    text = (ROOT / "launch" / "slurm.sbatch").read_text()
    assert "\nhow=starter " in text
    script = tmp_path / "slurm.sbatch"
    script.write_text(text.replace("\nhow=starter ", f"\nhow={how} "))
    program(tmp_path / "scontrol", "seq -f node-%g 100000")  # more than a pipe holds
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DRY_RUN": "1"}
    if how == "torchrun":
        env |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node-[1-100000]", "SLURM_JOB_ID": "0"}
    done = subprocess.run(["bash", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith(start)
    assert done.stdout.endswith(f"--output-dir {tmp_path}/hvdtrain/runs/0 --no-progress\n")
    assert how != "torchrun" or " --rdzv-endpoint node-1:20000 " in done.stdout


# Attempts of one job after each other: exit code, newest checkpoint, whether Slurm is to start it again.
ATTEMPTS = [(137, None, False), (75, None, True), (137, 1, True), (137, 1, False), (1, 2, True), (1, 3, True)]
ATTEMPTS += [(1, 4, False), (2, 5, False), (3, 6, False), (0, 7, False)]  # after three restarts


def test_slurms_script_starts_a_job_again_as_long_as_checkpoints_come(tmp_path):
    """With stand-ins for srun and scontrol; test_slurm.py has real ones."""
    output = tmp_path / "hvdtrain" / "runs" / "7" / "checkpoints"
    for directory in (tmp_path / "bin", tmp_path / "hvdtrain" / ".venv" / "bin"):
        directory.mkdir(parents=True)
    (tmp_path / "hvdtrain" / ".venv" / "bin" / "activate").touch()
    program(tmp_path / "bin" / "srun", "exit $CODE")
    program(tmp_path / "bin" / "scontrol", f'echo "$*" > {tmp_path}/said')
    for code, step, again in ATTEMPTS:
        if step is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / f"step-{step:08d}.safetensors").touch()
        env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "SLURM_JOB_ID": "7", "CODE": str(code)}
        script = ROOT / "launch" / "slurm.sbatch"
        done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done
        assert (tmp_path / "said").exists() == again, (code, step, done)
        assert (f"exit code {code}: not started again" in done.stderr) == (not again and code in (1, 137)), done
        if again:
            assert (tmp_path / "said").read_text() == "requeue 7\n"
            (tmp_path / "said").unlink()


def test_slurms_script_is_asked_to_stop_before_there_is_a_step(tmp_path):
    text = (ROOT / "launch" / "slurm.sbatch").read_text()
    (tmp_path / "slurm.sbatch").write_text(text.replace("\nmodules=''", "\nmodules='slow'"))
    program(tmp_path / "module", "kill -USR1 $PPID")
    program(tmp_path / "scontrol", 'echo "$*"')
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", tmp_path / "slurm.sbatch"], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (75, "requeue 7\n", "")


def test_slurms_script_knows_how_a_step_ended_while_it_heard_a_signal(tmp_path):
    """Slurm's commands may take seconds."""
    venv = tmp_path / "hvdtrain" / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "activate").touch()
    script = tmp_path / "slurm.sbatch"
    script.write_text((ROOT / "launch" / "slurm.sbatch").read_text().replace("\nhow=starter ", "\nhow=torchrun "))
    program(
        tmp_path / "srun",
        f"trap 'exit 75' TERM; echo $$ > {tmp_path}/step; sleep 1; kill -USR1 $PPID; while :; do sleep 0.1; done",
    )
    program(tmp_path / "scancel", f"kill -TERM $(cat {tmp_path}/step); sleep 2")
    program(tmp_path / "scontrol", f'echo "$*" > {tmp_path}/said')
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75, done
    assert (tmp_path / "said").read_text() == "requeue 7\n"
