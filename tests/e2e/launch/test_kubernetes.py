"""launch/kubernetes: valid by the published schemas; the pods' commands run on hosts with the pods' names and variables."""

import copy
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

MANIFESTS = ROOT / "launch" / "kubernetes"
COMMANDS = ("horovod", "reduce", "ddp")  # of horovod.yaml: as it is, and what its comments name
# What Kubeflow's operator sets in a container (kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go), by pod.
PET = (
    "PET_NNODES={nodes} PET_NPROC_PER_NODE={ranks} PET_NODE_RANK={index} PET_MASTER_ADDR={first} PET_MASTER_PORT=29400"
)


def documents(name: str) -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all((MANIFESTS / name).read_text())}


def job(command: str) -> dict:
    """Return horovod.yaml's Job with one of its commands."""
    found = documents("horovod.yaml")["Job"]
    text = (MANIFESTS / "horovod.yaml").read_text()
    comment = re.search(rf"^ +# {command}: .*\n((?: +#   .*\n)+)", text, re.MULTILINE)
    instead = yaml.safe_load(re.sub(r"^ +#   ", "", comment[1], flags=re.MULTILINE)) if comment else {}
    assert bool(instead) == (command != "horovod")
    found["spec"]["template"]["spec"]["containers"][0] |= instead
    return found


def validate(document: dict) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    with warnings.catch_warnings(action="ignore"):
        validator.validate(document, validator.latest_version(), strict=True)


def test_the_job_is_valid_and_consistent():
    found = documents("horovod.yaml")
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
    job = documents("horovod.yaml")["Job"]
    job["spec"]["template"]["spec"]["runAsUser"] = 1000
    with pytest.raises((jsonschema.ValidationError, Exception), match="runAsUser"):
        validate(job)


def test_the_mpijob_is_valid():
    """Its pods by the published schema; its own fields as kubeflow/mpi-operator's v2beta1 defines them."""
    job = yaml.safe_load((MANIFESTS / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    known = {"slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"}
    assert set(spec) <= known | {"launcherCreationPolicy", "mpiImplementation"}
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replica in spec["mpiReplicaSpecs"].values():
        assert set(replica) == {"replicas", "restartPolicy", "template"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **copy.deepcopy(replica["template"])}
        validate(pod)
    worker = spec["mpiReplicaSpecs"]["Worker"]
    words = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
    assert int(words[words.index("-np") + 1]) == worker["replicas"] * spec["slotsPerWorker"]
    resources = worker["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == spec["slotsPerWorker"]


def trainjob() -> tuple[dict, dict]:
    """Return the TrainJob's trainer, and its patch of the pods."""
    spec = yaml.safe_load((MANIFESTS / "trainjob.yaml").read_text())["spec"]
    (replicated,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"  # of the runtime torch-distributed
    return spec["trainer"], replicated["template"]["spec"]["template"]["spec"]


def test_the_trainjob_is_valid():
    """Its pods by the published schema; its own fields as kubeflow/trainer's v1alpha1 defines them."""
    job = yaml.safe_load((MANIFESTS / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(job["spec"]) == {"runtimeRef", "trainer", "runtimePatches"}
    trainer, pod = trainjob()
    assert set(trainer) <= {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert not [
        entry["name"] for entry in trainer["env"] if entry["name"].startswith("PET_")
    ]  # refused by the operator
    ranks = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert trainer["command"][-2:] == ["--local-ranks", str(ranks)]
    assert trainer["numProcPerNode"] == ranks
    (patched,) = pod["containers"]
    assert set(patched) <= {"name", "env", "volumeMounts", "securityContext"}  # all that a patch may have
    whole = patched | {key: trainer[key] for key in ("image", "command", "args", "env")}
    spec = pod | {"containers": [whole | {"resources": trainer["resourcesPerNode"]}]}
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec})


def test_the_trainjobs_pods_find_their_place():
    trainer, _ = trainjob()
    first = "hvdtrain-node-0-0.hvdtrain"
    for index in range(trainer["numNodes"]):
        text = PET.format(nodes=trainer["numNodes"], ranks=trainer["numProcPerNode"], index=index, first=first)
        environment = dict(word.split("=") for word in text.split())
        assert announced(environment) == ("Kubeflow", index, 2)
        assert meeting_point(environment, "Kubeflow") == (first, 29400)


@pytest.mark.parametrize("name", ["horovod.yaml", "mpijob.yaml"])
def test_no_pod_is_root_or_may_become_it(name):
    found = documents(name)
    pods = [found["Job"]["spec"]["template"]] if "Job" in found else []
    pods += [spec["template"] for spec in found.get("MPIJob", {}).get("spec", {}).get("mpiReplicaSpecs", {}).values()]
    for pod in pods:
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            capabilities = container["securityContext"]["capabilities"]
            assert capabilities["drop"] == ["ALL"]
            # InfiniBand locks memory; the launcher of an MPIJob has no GPU.
            assert capabilities.get("add", []) == (["IPC_LOCK"] if container["name"] != "launcher" else [])
            memory = int(container["resources"]["limits"]["memory"].removesuffix("Gi").removesuffix("Mi"))
            assert memory >= 5 * container["resources"]["limits"].get("nvidia.com/gpu", 0)


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
        container, nodes, pods = trainjob()[0], trainjob()[0]["numNodes"], "hvdtrain-node-0"
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
                "PATH": f"{BIN}:/usr/bin:/bin",
                "PYTHONPATH": str(ROOT),
                "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            }
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
    spec = yaml.safe_load((MANIFESTS / "mpijob.yaml").read_text())["spec"]
    keys = tmp_path / "ssh"
    keys.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", keys / "id_rsa"], check=True, timeout=60)
    shutil.copy(keys / "id_rsa.pub", keys / "authorized_keys")
    workers = ["hvdtrain-mpi-worker-0", "hvdtrain-mpi-worker-1"]
    (tmp_path / "hostfile").write_text("".join(f"{worker} slots=2\n" for worker in workers))

    def words(role: str) -> list[str]:
        container = spec["mpiReplicaSpecs"][role]["template"]["spec"]["containers"][0]
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
