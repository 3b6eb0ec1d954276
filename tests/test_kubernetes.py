"""k8s/: every manifest against the schemas, its variables through the library, and two of them on a real cluster.

The cluster is the one that kubectl points to. It needs a node with 4 GPUs, counted or real, with the label that
k8s/job.yaml selects, and the image pytorch-ddp.
"""

import itertools
import json
import re
import shutil
import subprocess
import time
import uuid

import kubernetes_validate
import pytest
import yaml
from conftest import DDP, ROOT, done_lines, leave_out, wait_until

from allranks import resolve

MANIFESTS = {path.stem: list(yaml.safe_load_all(path.read_text())) for path in (ROOT / "k8s").glob("*.yaml")}
CORE = [
    pytest.param(document, id=f"{name}-{document['kind']}-{document['metadata']['name']}")
    for name, documents in MANIFESTS.items()
    for document in documents
    if "." not in document["apiVersion"] or document["apiVersion"].startswith("networking.k8s.io")
]
LABEL = "nvidia.com/gpu.present=true"


# --- without a cluster -----------------------------------------------------------------------------------------------


def test_the_manifests_are_all_there():
    assert MANIFESTS.keys() == {"job", "pods", "indexed-job", "jobset", "pytorchjob", "trainjob", "networkpolicy"}


@pytest.mark.parametrize("document", CORE)
def test_core_kinds_are_strictly_valid(document):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_network_policy_lets_in_the_jobs_own_pods_and_nobody_else():
    [policy] = [document["spec"] for document in MANIFESTS["networkpolicy"]]
    pods = [document["spec"]["template"]["metadata"]["labels"] for document in MANIFESTS["pods"][1:]]
    assert policy["policyTypes"] == ["Ingress"] and len(pods) == 2
    for selector in (
        policy["podSelector"],
        *(one["podSelector"] for rule in policy["ingress"] for one in rule["from"]),
    ):
        assert all(selector["matchLabels"].items() <= labels.items() for labels in pods) and selector["matchLabels"]


def pod_specs():
    for name, documents in MANIFESTS.items():
        for document in documents:
            yield from ((name, spec) for spec in find_pod_specs(document))


def find_pod_specs(node):
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        else:
            for value in node.values():
                yield from find_pod_specs(value)
    elif isinstance(node, list):
        for value in node:
            yield from find_pod_specs(value)


@pytest.mark.parametrize(("name", "spec"), list(pod_specs()))
def test_every_pod_is_strictly_valid_hardened_and_has_room_for_nccl(name, spec):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    container = spec["containers"][0]
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
    assert volumes[mounts["/dev/shm"]] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == (4 if name == "job" else 2)


def environ(spec, index):
    """What the container of node `index` gets from its manifest in the namespace "lab"."""
    known = {
        "metadata.namespace": "lab",
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
    }
    values = {}
    for entry in spec["containers"][0].get("env", []):
        value = entry["value"] if "value" in entry else known[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], value)
    return values


def kubeflow(index, master, port):
    """Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go"""
    values = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(index)}
    return values | {"PET_MASTER_ADDR": master, "PET_MASTER_PORT": port}


def pytorchjob(index):
    """Source: kubeflow/training-operator 1.9, pkg/controller.v1/pytorch/envvar.go"""
    master = "pytorch-ddp-master-0"
    values = {"RANK": str(index), "WORLD_SIZE": "4", "MASTER_ADDR": master, "MASTER_PORT": "23456"}
    return kubeflow(index, master, "23456") | values


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("name", "master", "port"),
    [
        ("pods", "test-0.test-service.lab.svc.cluster.local", 29500),
        ("indexed-job", "pytorch-ddp-0.pytorch-ddp", 29500),
        ("jobset", "pytorch-ddp-node-0-0.pytorch-ddp", 29500),
        ("pytorchjob", "pytorch-ddp-master-0", 23456),
        ("trainjob", "pytorch-ddp-node-0-0.pytorch-ddp", 29500),
    ],
)
def test_every_node_knows_its_place(name, master, port, index):
    if name == "trainjob":
        given = kubeflow(index, master, str(port))
    elif name == "pytorchjob":
        given = pytorchjob(index)
    else:
        specs = list(find_pod_specs(MANIFESTS[name]))
        given = environ(specs[index % len(specs)], index)
    world = resolve(given)
    assert (world.level, world.node_rank, world.nnodes) == ("node", index, 2)
    assert (world.master_addr, world.master_port) == (master, port)


def test_the_names_of_the_nodes_are_those_of_their_services():
    service, *jobs = MANIFESTS["pods"]
    for index, job in enumerate(jobs):
        spec = job["spec"]["template"]["spec"]
        assert spec["subdomain"] == service["metadata"]["name"] and service["spec"]["publishNotReadyAddresses"]
        assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
        assert (
            resolve(environ(spec, index)).host_addr == f"{spec['hostname']}.{spec['subdomain']}.lab.svc.cluster.local"
        )
    service, job = MANIFESTS["indexed-job"]
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


# --- on a cluster ----------------------------------------------------------------------------------------------------


def kubectl(*args, timeout=60, check=True, **options):
    done = subprocess.run(["kubectl", *args], capture_output=True, text=True, timeout=timeout, **options)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cluster():
    if not shutil.which("kubectl"):
        leave_out("kubectl is not here")
    nodes = kubectl("get", "nodes", "-l", LABEL, "-o", "json", "--request-timeout=10s", check=False)
    if not nodes:
        leave_out("no Kubernetes cluster answers: kubectl get nodes")
    gpus = [int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) for node in json.loads(nodes)["items"]]
    if max(gpus, default=0) < 4:
        leave_out(f"no node of this cluster has 4 GPUs and the label {LABEL}")


class Namespace:
    """A namespace of its own for a test; whatever is in it goes with it."""

    def __init__(self):
        self.name = f"allranks-{uuid.uuid4().hex[:8]}"
        self("create", "namespace", self.name)

    def __call__(self, *args, **options):
        return kubectl("-n", self.name, *args, **options)

    def get(self, *args):
        return json.loads(self("get", *args, "-o", "json"))

    def apply(self, name, args=None, gpus=None, **spec):
        """Apply k8s/NAME.yaml through tests/kubernetes/NAME, with other arguments, GPUs or fields of the Jobs' spec."""
        overlay = str(ROOT / "tests/kubernetes" / name)
        documents = list(yaml.safe_load_all(kubectl("kustomize", "--load-restrictor=LoadRestrictionsNone", overlay)))
        for document in documents:
            if document["kind"] == "Job":
                document["spec"] |= spec
                container = document["spec"]["template"]["spec"]["containers"][0]
                container["args"] = args or container["args"]
                container["resources"]["limits"]["nvidia.com/gpu"] = (
                    gpus or container["resources"]["limits"]["nvidia.com/gpu"]
                )
        self("apply", "-f", "-", input=yaml.safe_dump_all(documents))

    def pods(self, job):
        return self.get("pods", "-l", f"job-name={job}")["items"]

    def pod(self, job):
        """The name of the job's pod, once its ranks have been started."""

        def ready():
            names[:] = [pod["metadata"]["name"] for pod in self.pods(job) if pod["status"]["phase"] == "Running"]
            look = ["--", "pgrep", "-fc", "python -u -m allranks run"]
            return names and int(self("exec", names[-1], *look, check=False) or 0) >= 2

        names = []
        wait_until(ready, timeout=90)
        return names[-1]


@pytest.fixture
def namespace(cluster):
    made = Namespace()
    yield made
    # its pods have given their GPUs back when this returns
    kubectl("delete", "namespace", made.name, "--timeout=90s", timeout=100)


ENDLESS = ["./serve.sh", "example.py", "--steps", "1000000000"]


def test_the_manifest_of_the_guide_is_accepted_as_it_is(namespace):
    namespace("apply", "--dry-run=server", "-f", str(DDP / "job.yaml"))


def test_the_job_trains_on_every_gpu(namespace):
    namespace.apply("job")
    namespace("wait", "--for=condition=complete", "job/pytorch-ddp", "--timeout=120s", timeout=130)
    ranks = done_lines(namespace("logs", "job/pytorch-ddp"))
    assert [(rank["rank"], rank["world_size"]) for rank in ranks] == [(str(i), "4") for i in range(4)]
    assert len({rank["weights"] for rank in ranks}) == 1


def test_inside_the_job_and_its_end_by_sigterm(namespace):
    namespace.apply("job", args=ENDLESS)
    pod = namespace.pod("pytorch-ddp")
    look = "df --output=size -k /dev/shm | tail -1; id -u; touch /opt/ddp/x 2>/dev/null || echo read-only"
    assert namespace("exec", pod, "--", "bash", "-c", look).split() == ["1048576", "1000", "read-only"]
    began = time.monotonic()
    namespace("delete", "job", "pytorch-ddp")
    namespace("wait", "--for=delete", f"pod/{pod}", "--timeout=60s", timeout=70, check=False)
    assert time.monotonic() - began < 30, "of the 60 s that it has"


def test_more_gpus_than_there_are_is_said(namespace):
    namespace.apply("job", gpus=1000)

    def message():
        conditions = [entry for pod in namespace.pods("pytorch-ddp") for entry in pod["status"].get("conditions", [])]
        return [entry["message"] for entry in conditions if entry.get("reason") == "Unschedulable"]

    wait_until(message)
    assert "Insufficient nvidia.com/gpu" in message()[0]


def test_a_failing_rank_fails_the_job_after_its_retries_and_the_logs_stay(namespace):
    namespace.apply("job", args=["./serve.sh", "example.py", "--steps", "1"], backoffLimit=1)
    namespace("wait", "--for=condition=failed", "job/pytorch-ddp", "--timeout=120s", timeout=130)
    [condition] = [
        entry for entry in namespace.get("job", "pytorch-ddp")["status"]["conditions"] if entry["type"] == "Failed"
    ]
    assert condition["reason"] == "BackoffLimitExceeded"
    pods = namespace.pods("pytorch-ddp")
    assert len(pods) == 2
    for pod in pods:
        assert "the loss did not fall" in namespace("logs", pod["metadata"]["name"])


def test_a_finished_job_is_removed(namespace):
    namespace.apply("job", args=["true"], ttlSecondsAfterFinished=1)
    namespace("wait", "--for=delete", "job/pytorch-ddp", "--timeout=60s", timeout=70)
    wait_until(lambda: not namespace.pods("pytorch-ddp"))


def test_two_nodes_behind_a_headless_service(namespace):
    namespace.apply("pods")
    check_both_nodes(namespace)


@pytest.mark.parametrize("lost", ["test-0", "test-1"], ids=["master", "worker"])
def test_a_lost_pod_is_replaced_and_all_nodes_meet_again(namespace, lost):
    namespace.apply("pods", args=["./serve.sh", "example.py", "--steps", "1000"])
    pods = {job: namespace.pod(job) for job in ("test-0", "test-1")}
    namespace("delete", "pod", pods[lost], "--grace-period=0", "--force")
    check_both_nodes(namespace)
    assert pods[lost] not in [pod["metadata"]["name"] for pod in namespace.pods(lost)]


def check_both_nodes(namespace):
    jobs = ("job/test-0", "job/test-1")
    try:
        namespace("wait", "--for=condition=complete", *jobs, "--timeout=180s", timeout=190)
    except AssertionError:
        print(*(namespace("logs", pod, check=False) for pod in namespace("get", "pods", "-o", "name").split()))
        raise
    succeeded = [
        pod for job in ("test-0", "test-1") for pod in namespace.pods(job) if pod["status"]["phase"] == "Succeeded"
    ]
    logs = [namespace("logs", pod["metadata"]["name"]) for pod in succeeded]
    ranks = list(itertools.chain(*map(done_lines, logs)))
    assert [(rank["rank"], rank["world_size"]) for rank in ranks] == [(str(i), "4") for i in range(4)]
    assert len({rank["weights"] for rank in ranks}) == 1
