"""launch/kubernetes/horovod.yaml and its variants: valid by the published schemas; the pods' commands run on hosts."""

import re
import shutil
import subprocess
import sys
import warnings

import pytest
import yaml

from hvdtrain.engines.launchers import announced
from hvdtrain.launching.rendezvous import meeting_point
from tests.e2e.cluster import Cluster, needs_hosts, needs_ssh
from tests.e2e.launchers import BIN, ROOT

MANIFEST = (ROOT / "launch" / "kubernetes" / "horovod.yaml").read_text()
COMMANDS = ("horovod", "reduce", "ddp")  # of horovod.yaml: as it is, and what its comments name
# What Kubeflow's operator sets in a container (kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go), by pod.
PET = (
    "PET_NNODES={nodes} PET_NPROC_PER_NODE={ranks} PET_NODE_RANK={index} PET_MASTER_ADDR={first} PET_MASTER_PORT=29400"
)


def documents() -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST)}


def job(command: str) -> dict:
    """Return the Job with one of its commands."""
    found = documents()["Job"]
    comment = re.search(rf"^ +# {command}: .*\n((?: +#   .*\n)+)", MANIFEST, re.MULTILINE)
    instead = yaml.safe_load(re.sub(r"^ +#   ", "", comment[1], flags=re.MULTILINE)) if comment else {}
    assert bool(instead) == (command != "horovod")
    found["spec"]["template"]["spec"]["containers"][0] |= instead
    return found


def variant(kind: str) -> dict:
    """Return a variant, which stands in a comment."""
    comment = re.search(rf"^# {kind}: .*\n(?:# \S.*\n)+((?:#   .*\n)+)", MANIFEST, re.MULTILINE)
    assert comment is not None
    found = yaml.safe_load(re.sub(r"^#   ", "", comment[1], flags=re.MULTILINE))
    assert found["kind"] == kind
    return found


def pod(**fields: object) -> dict:
    """Return the Job's pod, with other fields of its container."""
    spec = job("horovod")["spec"]["template"]["spec"]
    spec["containers"][0] |= fields
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}


def validate(document: dict) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    with warnings.catch_warnings(action="ignore"):
        validator.validate(document, validator.latest_version(), strict=True)


def test_the_job_is_valid_and_consistent():
    found = documents()
    for document in found.values():
        validate(document)
    job, pod = found["Job"]["spec"], found["Job"]["spec"]["template"]["spec"]
    env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert str(job["completions"]) == str(job["parallelism"]) == env["WORLD_SIZE"] == "2"
    ranks = pod["containers"][0]["command"][-2:]  # all of a node in one pod, with all its GPUs: NVLink ends at a pod
    assert ranks == ["--local-ranks", str(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])]
    assert {document["metadata"]["name"] for document in found.values()} == {"hvdtrain"} == {pod["subdomain"]}
    assert env["MASTER_ADDR"] == "hvdtrain-0.hvdtrain"
    labels = job["template"]["metadata"]["labels"]
    assert (
        labels == found["Service"]["spec"]["selector"] == found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    )
    assert found["Service"]["spec"]["ports"][0]["port"] == int(env["MASTER_PORT"]) == 9000


@pytest.mark.parametrize("command", COMMANDS)
def test_the_job_is_valid_with_each_command(command):
    validate(job(command))


def test_a_wrong_field_would_be_found():
    jsonschema = pytest.importorskip("jsonschema")
    job = documents()["Job"]
    job["spec"]["template"]["spec"]["runAsUser"] = 1000
    with pytest.raises((jsonschema.ValidationError, Exception), match="runAsUser"):
        validate(job)


def test_the_mpijob_is_valid():
    """Its pods by the published schema; its own fields as kubeflow/mpi-operator's v2beta1 defines them."""
    job = variant("MPIJob")
    assert job["apiVersion"] == "kubeflow.org/v2beta1"
    spec = job["spec"]
    known = {"slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"}
    assert set(spec) <= known | {"launcherCreationPolicy", "mpiImplementation"}
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replica in spec["mpiReplicaSpecs"].values():
        validate(pod(**{name: field for name, field in replica.items() if name not in ("replicas", "restartPolicy")}))
    worker, words = spec["mpiReplicaSpecs"]["Worker"], spec["mpiReplicaSpecs"]["Launcher"]["args"]
    assert int(words[words.index("-np") + 1]) == worker["replicas"] * spec["slotsPerWorker"]
    resources = pod()["spec"]["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == spec["slotsPerWorker"]


def trainer() -> dict:
    """Return the TrainJob's trainer, with what it takes from the Job's container."""
    container = pod()["spec"]["containers"][0]
    return {key: container[key] for key in ("image", "command", "args")} | variant("TrainJob")["spec"]["trainer"]


def test_the_trainjob_is_valid():
    """Its own fields as kubeflow/trainer's v1alpha1 defines them."""
    job = variant("TrainJob")
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert set(job["spec"]) == {"runtimeRef", "trainer", "runtimePatches"}
    (replicated,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated == {"name": "node", "template": {"spec": {"template": {"spec": "POD"}}}}
    whole = trainer()
    assert not [entry["name"] for entry in whole["env"] if entry["name"].startswith("PET_")]  # refused by the operator
    assert whole["command"][-2:] == ["--local-ranks", str(whole["numProcPerNode"])]


def test_the_trainjobs_pods_find_their_place():
    first = "hvdtrain-node-0-0.hvdtrain"
    for index in range(trainer()["numNodes"]):
        text = PET.format(nodes=trainer()["numNodes"], ranks=trainer()["numProcPerNode"], index=index, first=first)
        environment = dict(word.split("=") for word in text.split())
        assert announced(environment) == ("Kubeflow", index, 2)
        assert meeting_point(environment, "Kubeflow") == (first, 29400)


def test_no_pod_is_root_or_may_become_it():
    spec = pod()["spec"]
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        capabilities = container["securityContext"]["capabilities"]
        assert (capabilities["drop"], capabilities["add"]) == (["ALL"], ["IPC_LOCK"])  # InfiniBand locks memory
        memory = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
        assert memory >= 5 * container["resources"]["limits"]["nvidia.com/gpu"]


def as_pod_user() -> list[str]:
    """Return what makes a command run as the pods' user, where that user may read this environment; else nothing."""
    command = [shutil.which("setpriv") or "false", "--reuid=1000", "--regid=1000", "--clear-groups", "--no-new-privs"]
    tried = subprocess.run(
        [*command, "env", sys.executable, "-c", "import hvdtrain, torch"], capture_output=True, cwd="/"
    )
    return command if tried.returncode == 0 else []


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS, "trainjob"])
def test_pods_run(command, tmp_path):
    """Each pod's command, with two ranks, and only the environment that the manifest, the image and Kubernetes give."""
    title = "hvdtrain"
    if command == "trainjob":
        container, nodes, pods = trainer(), trainer()["numNodes"], "hvdtrain-node-0"
    else:
        spec = job(command)["spec"]
        container, nodes, pods = spec["template"]["spec"]["containers"][0], spec["completions"], title
    out = tmp_path / "out"
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    hosts = [f"{pods}-{index}" for index in range(nodes)]
    with Cluster(tmp_path, hosts, domain=title) as cluster:
        started = {}
        for index, host in enumerate(hosts):
            of_fields = {
                "RANK": str(index),
                "HVDTRAIN_JOB_SECRET": "3f0a9c1e-5d0b-4c4e-9a55-0a0f4a1b2c3d",
            }  # a job's UID
            variables = {entry["name"]: entry.get("value") or of_fields[entry["name"]] for entry in container["env"]}
            variables |= {
                "PATH": f"{BIN}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            }  # fmt: skip
            if command == "trainjob":
                told = PET.format(nodes=nodes, ranks=2, index=index, first=f"{hosts[0]}.{title}")
                variables |= dict(word.split("=") for word in told.split())
            typed = [*container["command"][:-1], "2", "--oversubscribe", *container["args"]]
            words = [str(out) if word == "/out" else word for word in typed]
            clean = ["env", "-i", *(f"{key}={value}" for key, value in variables.items())]
            started[host] = cluster.start(host, [*as_pod_user(), *clean, *words])
        done = cluster.finish(started, 90)
    for rank in done.values():
        assert rank.code == 0, rank
    first = done[hosts[0]].stdout
    if command == "reduce":
        assert [line for line in first.splitlines() if line.startswith("before")] == [
            f"before {r} data {r + 1}" for r in range(4)
        ]
        assert [line for line in first.splitlines() if line.startswith("after")] == [
            f"after {r} data 10" for r in range(4)
        ]
    else:
        assert "4 ranks on 2 hosts" in first, first
        assert "test accuracy" in first


@needs_hosts
@needs_ssh
@pytest.mark.slow
def test_the_mpijobs_pods_run(tmp_path):
    """Launcher and workers with one key pair, as the operator mounts it; here as root: ssh wants a user with a name."""
    spec = variant("MPIJob")["spec"]
    keys = tmp_path / "ssh"
    keys.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", keys / "id_rsa"], check=True, timeout=60)
    shutil.copy(keys / "id_rsa.pub", keys / "authorized_keys")
    workers = ["hvdtrain-mpi-worker-0", "hvdtrain-mpi-worker-1"]
    (tmp_path / "hostfile").write_text("".join(f"{worker} slots=2\n" for worker in workers))

    def words(role: str) -> list[str]:
        container = spec["mpiReplicaSpecs"][role]
        # The image's mpirun and python are found by sshd's default PATH; here they are in a virtual environment.
        text = [
            word.replace(spec["sshAuthMountPath"], str(keys)) for word in [*container["command"], *container["args"]]
        ]
        text = [word.replace("/tmp/known_hosts", f"{tmp_path}/known_hosts") for word in text]
        identity = f"-p 2222 -o IdentityFile={keys}/id_rsa "
        text = ["4" if word == "16" else word for word in text]  # two ranks each
        return [word.replace("-p 2222 ", identity).replace("exec mpirun", f"exec {BIN}/mpirun") for word in text]

    with Cluster(tmp_path, [*workers, "hvdtrain-mpi-launcher"]) as cluster:
        for worker in workers:
            cluster.start(worker, words("Worker"), quiet=True)
            ready = cluster.run(worker, ["sh", "-c", "until ss -Hltn | grep -q :2222; do sleep 0.1; done"], timeout=10)
            assert ready.code == 0
        hostfile = {
            "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hostfile"),
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        }
        done = cluster.run("hvdtrain-mpi-launcher", [*words("Launcher"), "--threads", "1"], timeout=90, **hostfile)
    assert done.code == 0, done
    assert "4 ranks on 2 hosts, horovod over MPI" in done.stdout, done
