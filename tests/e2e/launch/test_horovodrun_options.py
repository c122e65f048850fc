"""horovodrun's own command line (launch/patches/26): whose options are whose, a quoted path, an elastic job on one host."""

import subprocess

from tests.e2e.launchers import LAUNCHERS, PYTHON, launch, running

HOROVODRUN = LAUNCHERS["gloo"].split()[0]


def test_options_of_the_script_are_not_taken_for_abbreviations(tmp_path):
    (tmp_path / "show.py").write_text("import sys\nprint('got', *sys.argv[1:])\n")
    done = launch(f"{LAUNCHERS['gloo'].format(ranks=1)} {PYTHON} {tmp_path}/show.py --c 1 --check 2", timeout=60)
    assert done.code == 0, done
    assert "got --c 1 --check 2" in done.stdout


def test_output_filename_may_have_a_blank(tmp_path):
    done = launch(
        f"{HOROVODRUN} --mpi -np 1 --output-filename '{tmp_path}/two words' {PYTHON} -c 'print(42)'", timeout=60
    )
    assert done.code == 0, done
    written = [path.read_text() for path in (tmp_path / "two words").rglob("stdout")]
    assert len(written) == 1, done
    assert "42" in written[0]


def test_an_elastic_job_on_one_host_says_what_it_waits_for(tmp_path):
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    command = f"{HOROVODRUN} --gloo -np 2 --min-np 2 --host-discovery-script {hosts} {PYTHON} -c ''"
    with running(command, stderr=subprocess.PIPE) as (process, _):
        said = next(line for line in process.stderr if "waiting for" in line)  # the test's own time limit is the limit
    assert "waiting for 2 hosts, 1 so far" in said
    assert "--network-interface NAME skips this" in said
