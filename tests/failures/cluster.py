"""A cluster of containers, one per node, on a network that nothing else is on; and real faults for it."""

import contextlib
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import docker

JOB = Path(__file__).with_name("job.py")


class End(NamedTuple):
    """How a node ended. status: None where it had not by the deadline. seconds: since the last fault, or start."""

    status: int | None
    log: str
    seconds: float


class Cluster:
    """plain: nodes are started by torchrun, and the script has no line of ours."""

    def __init__(self, client: docker.DockerClient, name: str = "allranks-failures", plain: bool = False):
        self.client, self.name, self.plain = client, name, plain
        self.nodes: dict[str, docker.models.containers.Container] = {}
        self.networks: list = []
        self.since = time.monotonic()

    def __enter__(self):
        self.network = self.add_network("cluster")
        return self

    def __exit__(self, *exception):
        for node in self.nodes.values():
            with contextlib.suppress(docker.errors.APIError):
                node.remove(force=True)
        for network in self.networks:
            network.remove()

    def add_network(self, name: str):
        name = f"{self.name}-{name}"
        for old in self.client.networks.list(names=[name]):  # of a run that was killed
            old.remove()
        self.networks.append(self.client.networks.create(name, driver="bridge", internal=True))
        return self.networks[-1]

    def start(self, name: str, rank, nnodes=2, nproc=1, master="node0", port=29500, first_network=None, **options):
        """Start a node that is told to be number `rank` of nnodes, with nproc ranks. CAPITAL options: environ."""
        environ = {key: str(value) for key, value in options.items() if key.isupper()}
        options = {key: value for key, value in options.items() if not key.isupper()}
        environ |= {"OMP_NUM_THREADS": "1", "NPROC_PER_NODE": str(nproc), "PYTHONUNBUFFERED": "1"} | environ
        command = ["python", "/job.py"]
        if self.plain:
            place = [f"--nnodes={nnodes}", f"--node-rank={rank}", f"--master-addr={master}", f"--master-port={port}"]
            command = ["torchrun", f"--nproc-per-node={nproc}", *place, "/job.py"]
            environ["PLAIN"] = "1"
        else:
            sing = {"RANK": rank, "WORLD_SIZE": nnodes, "MASTER_ADDR": master, "JOB_NAME": "test"}
            environ = {f"SING_{key}": str(value) for key, value in sing.items()} | environ
            environ |= {"SING_HOSTNAME_SUFFIX": "svc", "MASTER_PORT": str(port)}
        before, after = environ.pop("SHELL_BEFORE", ""), environ.pop("SHELL_AFTER", "")
        if before or after:
            command = ["bash", "-c", f"{before}\n{' '.join(command)}; status=$?; {after}\nexit $status"]
        node = self.client.containers.create(
            "allranks-base",
            command,
            name=f"{self.name}-{name}",
            hostname=name,
            environment=environ,
            network=(first_network or self.network).name,
            volumes={str(JOB): {"bind": "/job.py", "mode": "ro"}, **options.pop("volumes", {})},
            **options,
        )
        self.nodes[name] = node
        if first_network:
            self.network.connect(node, aliases=[name])
        else:  # an alias, so that peers find it by its host's name
            self.network.disconnect(node)
            self.network.connect(node, aliases=[name, f"{name}.svc"])
        node.start()
        self.since = time.monotonic()

    def log(self, name: str) -> str:
        return self.nodes[name].logs().decode(errors="replace")

    def await_log(self, name: str, words: str, timeout: float = 60) -> None:
        """Return once the node has printed the words."""
        end = time.monotonic() + timeout
        while words not in self.log(name):
            self.nodes[name].reload()
            assert self.nodes[name].status == "running" and time.monotonic() < end, self.log(name)
            time.sleep(0.1)

    def fault(self, name: str, action: str, *args) -> None:
        """Once all nodes train: kill, pause, disconnect a node, or iptables in it."""
        for node in self.nodes:
            self.await_log(node, "met rank=")
        self.since = time.monotonic()
        node = self.nodes[name]
        if action == "disconnect":
            self.network.disconnect(node)
        elif action == "iptables":
            self.iptables(name, *args)
        else:
            getattr(node, action)(*args)

    def iptables(self, name: str, *rule: str) -> None:
        """Add a rule in the node's own network."""
        subprocess.run(["nsenter", "-t", self.pid(name), "-n", "iptables", *rule], check=True, capture_output=True)

    def pid(self, name: str) -> str:
        self.nodes[name].reload()
        return str(self.nodes[name].attrs["State"]["Pid"])

    def address(self, name: str) -> str:
        self.nodes[name].reload()
        return self.nodes[name].attrs["NetworkSettings"]["Networks"][self.network.name]["IPAddress"]

    def wait(self, names, deadline: float) -> dict[str, End]:
        """Wait for these nodes until the deadline (seconds since the last start or fault)."""
        ends: dict[str, End] = {}
        while len(ends) < len(names):
            late = time.monotonic() - self.since
            for name in names:
                node = self.nodes[name]
                node.reload()
                over = node.status == "exited"
                if name not in ends and (over or late > deadline):
                    status = node.attrs["State"]["ExitCode"] if over else None
                    ends[name] = End(status, self.log(name), late)
            time.sleep(0.1)
        return ends
