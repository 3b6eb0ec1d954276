"""The catalogue: what goes wrong when distributed training starts or stops, made for real, and what must be said.

A case starts its nodes and makes its fault. `bench/failures.py` runs the same with plain torchrun.
"""

from collections.abc import Callable
from typing import NamedTuple

from cluster import Cluster

STALL = 8  # seconds
LONG = 100_000  # steps: until the fault ends them


class Case(NamedTuple):
    """One row.

    number, title: of the catalogue. make: starts the nodes, makes the fault. says: what the lines of each node must
    match (for those nodes in it), and names the cause. statuses: of the nodes in it. deadline: seconds from the last
    start, or the fault, on a machine that is not busy. tracebacks: how many there may be on all nodes together.
    """

    number: str
    title: str
    make: Callable[[Cluster], None]
    says: dict[str, str]
    statuses: dict[str, int]
    deadline: float
    tracebacks: int = 0

    @property
    def concerns(self) -> list[str]:
        """The nodes whose ends matter."""
        return list(dict.fromkeys([*self.says, *self.statuses]))


def nodes(cluster: Cluster, count: int = 2, nproc: int = 1, **options) -> None:
    for rank in range(count):
        cluster.start(f"node{rank}", rank, count, nproc, **options)


def case(number: str, title: str, deadline: float, status: int | dict = 0, tracebacks: int = 0, **says: str):
    """Add the function below to the catalogue. status: of the nodes that have something to say, or by node."""

    def add(make):
        statuses = status if isinstance(status, dict) else dict.fromkeys(says, status)
        CASES.append(Case(number, title, make, says, statuses, deadline, tracebacks))
        return make

    return add


CASES: list[Case] = []


@case("1", "the master comes late", 40, node1=r"waiting for the master node0:29500 \(1\d of 600 s\)")
def late_master(cluster):
    cluster.start("node1", 1)
    try:
        cluster.await_log("node1", "waiting for the master", 30)
    except AssertionError:
        if not cluster.plain:
            raise
    cluster.start("node0", 0)


@case("2", "the master's name never resolves", 20, 69, node1=r"master-unresolved: the master's name 'nowhere.invalid'")
def unresolved(cluster):
    cluster.start("node1", 1, master="nowhere.invalid", ALLRANKS_RENDEZVOUS_TIMEOUT=5)


@case("3", "the master's port is closed", 20, 70, node1=r"master-refused: node0 \([\d.]+\) refuses connections on port")
def refused(cluster):
    cluster.start("node0", 0, port=29501, ALLRANKS_RENDEZVOUS_TIMEOUT=3)  # where nobody comes
    cluster.start("node1", 1, ALLRANKS_RENDEZVOUS_TIMEOUT=3)


@case(
    "3", "the master's port is silent", 20, 71, node1=r"master-silent: node0 \([\d.]+\) does not answer on port 29500"
)
def silent(cluster):
    cluster.start("node0", 0, ALLRANKS_RENDEZVOUS_TIMEOUT=3)
    cluster.iptables("node0", "-A", "INPUT", "-p", "tcp", "--dport", "29500", "!", "-i", "lo", "-j", "DROP")
    cluster.start("node1", 1, ALLRANKS_RENDEZVOUS_TIMEOUT=3)


@case(
    "4",
    "the master's port is taken",
    20,
    72,
    node0=r"port-taken: port 29500 of node0",
    node1=r"port-taken: what answers",
)
def taken(cluster):
    cluster.start("node0", 0, SHELL_BEFORE="python -m http.server 29500 & sleep 1", SHELL_AFTER="sleep 9")
    cluster.start("node1", 1, ALLRANKS_RENDEZVOUS_TIMEOUT=3)


ABSENT = r"rendezvous-failed: node 3 is missing, here are node 0 on node0, node 1 on node1, node 2 on node2"


@case("5", "a rank never arrives", 25, 73, node0=ABSENT, node1=ABSENT, node2=ABSENT)
def absent(cluster):
    for rank in range(3):
        cluster.start(f"node{rank}", rank, 4, ALLRANKS_RENDEZVOUS_TIMEOUT=8)


TWICE = r"rank-twice: node 1 is there twice: process \d+ on (node1 and process \d+ on node2|node2 and .* on node1)"


@case("6", "a rank twice", 20, 75, node0=TWICE, node1=TWICE, node2=TWICE)
def twice(cluster):
    for name, rank in (("node0", 0), ("node1", 1), ("node2", 1)):
        cluster.start(name, rank, 3)


SIZES = r"world-mismatch: SING_WORLD_SIZE differs: 2 for node 0 on node0, 3 for node 1 on node1"


@case("10", "WORLD_SIZE differs between ranks", 20, 76, node0=SIZES, node1=SIZES)
def world_sizes(cluster):
    cluster.start("node0", 0, 2)
    cluster.start("node1", 1, 3)


LOCAL = r"world-mismatch: ranks per node differs: 1 for node 0 on node0, 2 for node 1 on node1"


@case("11", "local sizes differ", 20, 76, node0=LOCAL, node1=LOCAL)
def local_sizes(cluster):
    cluster.start("node0", 0, nproc=1)
    cluster.start("node1", 1, nproc=2)


VERSIONS = r"version-mismatch: torch differs: 2\.5\S* for node 0 on node0, 2\.4\.1 for node 1 on node1"


@case("11", "torch's versions differ", 20, 77, node0=VERSIONS, node1=VERSIONS)
def versions(cluster):
    cluster.start("node0", 0)
    cluster.start("node1", 1, BEFORE="torch.__version__ = '2.4.1'")


@case(
    "12",
    "own name resolves to 127.0.1.1",
    30,
    node0=r"own name node0 resolves to 127.0.1.1, where no peer finds it: taking eth0 \(",
    node1=r"own name node1 resolves to 127.0.1.1, where no peer finds it: taking eth0 \(",
)
def loopback_name(cluster):
    for rank in range(2):
        hosts = f"printf '127.0.1.1 node{rank}\\n' | cat - /etc/hosts > /tmp/hosts && cat /tmp/hosts > /etc/hosts"
        cluster.start(f"node{rank}", rank, user="root", SHELL_BEFORE=hosts)


@case(
    "13", "two networks, the other one first", 30, node0=r"done rank=0 world_size=2", node1=r"done rank=1 world_size=2"
)
def two_networks(cluster):
    for rank in range(2):
        cluster.start(f"node{rank}", rank, first_network=cluster.add_network(f"other{rank}"))


NO_ENS3 = r"no-interface: GLOO_SOCKET_IFNAME=ens3: .* one of lo, eth0"


@case("14", "an interface that is not there", 10, 79, node0=NO_ENS3, node1=NO_ENS3)
def interface(cluster):
    nodes(cluster, GLOO_SOCKET_IFNAME="ens3")


PEERS = r"peer-unreachable: every host reaches the store at node0:29500, but not node\d to node\d \("


@case("16", "peers reachable on the store's port only", 30, 80, node0=PEERS, node1=PEERS, node2=PEERS)
def store_only(cluster):
    for rank in range(3):
        cluster.start(f"node{rank}", rank, 3, SHELL_BEFORE="sleep 2")
        for rule in (["--dport", "29500", "-j", "ACCEPT"], ["--syn", "!", "-i", "lo", "-j", "REJECT"]):
            cluster.iptables(f"node{rank}", "-A", "INPUT", "-p", "tcp", *rule)


@case(
    "17",
    "two jobs at one address and port",
    30,
    {"node0": 0, "node1": 0, "other1": 78},
    other1=r"job-mismatch: this is job 'other', and job 'test' meets at this address and port",
)
def two_jobs(cluster):
    cluster.start("node0", 0)
    cluster.await_log("node0", "", 5)
    cluster.start("other1", 1, SING_JOB_NAME="other")
    if not cluster.plain:
        cluster.await_log("other1", "job-mismatch")
    cluster.start("node1", 1)


STRANGE = """
import os, socket, time
kept = []
for turn in range(200):
    for port in (29500, *range(32768, 32778)):
        try:
            one = socket.create_connection(("node0", port), 1)
        except OSError:
            continue
        if turn % 2:
            one.sendall(os.urandom(64))
        kept = [*kept[-50:], one]
    time.sleep(0.05)
"""


@case("18", "a stranger talks to the port", 40, node0=r"done rank=0 world_size=2", node1=r"done rank=1 world_size=2")
def stranger(cluster):
    cluster.start("node0", 0, STEPS=60)
    cluster.start("node1", 1, STEPS=60, SHELL_BEFORE=f"python -c '{STRANGE}' & sleep 2")


@case("24", "proxies, no LANG, odd TZ, no HOME, unknown uid", 30, node0=r"done rank=0", node1=r"done rank=1")
def odd_environment(cluster):
    proxy = "http://192.0.2.1:3128"
    odd = {"HTTP_PROXY": proxy, "LANG": "", "TZ": "Antarctica/Troll", "HOME": ""}
    nodes(
        cluster, user="12345:54321", SHELL_BEFORE=f"unset HOME LANG; export http_proxy={proxy} all_proxy={proxy}", **odd
    )


def killed(rank: int) -> str:
    return rf"rank-failed: rank {rank} of 4 \(local rank \d on node\d\) was killed by SIGKILL"


@case("30", "a rank is killed", 15, {"node0": 82, "node1": 137}, node0=killed(2), node1=killed(2))
def rank_killed(cluster):
    nodes(cluster, nproc=2, FAULT_RANK=2, FAULT="os.kill(os.getpid(), 9)")


GONE = r"rank-failed: (rank \d of 4|node 1) \(.*node1.*\) ended without a word"


@case("30", "a node is killed", 15, {"node0": 82}, node0=GONE)
def node_killed(cluster):
    nodes(cluster, nproc=2, STEPS=LONG)
    cluster.fault("node1", "kill")


@case(
    "30", "the master's node is killed", 15, {"node1": 82}, node1=r"rank-failed: rank 0 on node0 ended without a word"
)
def master_killed(cluster):
    nodes(cluster, nproc=2, STEPS=LONG)
    cluster.fault("node0", "kill")


RAISED = r"rank-failed: rank 2 of 4 \(local rank 0 on node1\) raised ZeroDivisionError: division by zero"


@case("31", "a rank raises", 15, {"node0": 82, "node1": 1}, tracebacks=1, node0=RAISED, node1=RAISED)
def raised(cluster):
    nodes(cluster, nproc=2, FAULT_RANK=2, FAULT="1 / 0")


MEMORY = r"out-of-memory: rank 2 of 4 \(local rank 0 on node1\) was killed by SIGKILL for want of memory"


@case("32", "a rank runs out of memory", 25, 83, node0=MEMORY, node1=MEMORY)
def out_of_memory(cluster):
    fault = {"FAULT_RANK": 2, "FAULT": "torch.ones(1 << 30)"}
    nodes(cluster, nproc=2, mem_limit="1500m", memswap_limit="1500m", **fault)


FROZEN = r"stalled: rank 2 of 4 \(local rank 0 on node1\) ha(s|ve) not been heard of for \d+ s"


@case("33", "a rank is stopped", STALL + 15, 84, node0=FROZEN, node1=FROZEN)
def rank_stopped(cluster):
    nodes(cluster, nproc=2, FAULT_RANK=2, FAULT="os.kill(os.getpid(), 19)", ALLRANKS_STALL_TIMEOUT=STALL)


@case("33", "a node is paused", STALL + 15, {"node0": 84}, node0=r"stalled: rank \d of 4 .*node1\).* not been heard of")
def node_paused(cluster):
    nodes(cluster, nproc=2, STEPS=LONG, ALLRANKS_STALL_TIMEOUT=STALL)
    cluster.fault("node1", "pause")


@case(
    "33",
    "the master's node is paused",
    STALL + 15,
    {"node1": 84},
    node1=r"stalled: rank 0 on node0 ha(s|ve) not been heard",
)
def master_paused(cluster):
    nodes(cluster, nproc=2, STEPS=LONG, ALLRANKS_STALL_TIMEOUT=STALL)
    cluster.fault("node0", "pause")


BUSY = r"stalled: rank 1 of 2 \(.*node1\) keeps the others waiting \(rank 1 is at \S+; rank 0 is in all_reduce at job"


@case("33", "a rank is busy elsewhere", 2 * STALL + 15, 84, node0=BUSY, node1=BUSY)
def rank_busy(cluster):
    nodes(cluster, FAULT_RANK=1, FAULT="time.sleep(1000)", ALLRANKS_STALL_TIMEOUT=STALL)


@case(
    "34",
    "the network is cut",
    STALL + 15,
    84,
    node0=r"stalled: rank \d of 4 .*node1\).* ha(s|ve) not been heard of",
    node1=r"stalled: rank 0 on node0 ha(s|ve) not been heard of",
)
def network_cut(cluster):
    nodes(cluster, nproc=2, STEPS=LONG, ALLRANKS_STALL_TIMEOUT=STALL)
    cluster.fault("node1", "disconnect")


@case("35", "the network loses packets", 60, node0=r"done rank=0 world_size=2", node1=r"done rank=1 world_size=2")
def lossy(cluster):
    for rank in range(2):
        cluster.start(f"node{rank}", rank, SHELL_BEFORE="sleep 1", STEPS=50)
        loss = ["-m", "statistic", "--mode", "random", "--probability", "0.05", "-j", "DROP"]
        cluster.iptables(f"node{rank}", "-A", "INPUT", "!", "-i", "lo", *loss)


LOADER = """
loader = torch.utils.data.DataLoader(range(10 + rank * 2), batch_size=2)
for batch in loader: dist.all_reduce(torch.ones(1))
"""


@case("36", "uneven inputs", 2 * STALL + 15, {}, node0=r"uneven inputs: rank 0 has 5 batches, rank 1 has 6")
def uneven(cluster):
    nodes(cluster, FAULT_RANK="all", FAULT=LOADER, ALLRANKS_STALL_TIMEOUT=STALL)


CALLS = r"collective-mismatch: rank \d of 2 .* found that rank \d calls \w+ \[\d\], rank \d calls \w+ \[\d\]"


@case("37", "different collectives, with TORCH_DISTRIBUTED_DEBUG", 20, 85, tracebacks=1, node0=CALLS, node1=CALLS)
def mismatch(cluster):
    fault = {"FAULT_RANK": 1, "FAULT": "dist.broadcast(torch.ones(3), 0)", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    nodes(cluster, **fault)


VAIN = r"stalled: rank 0 of 2 .*, rank 1 of 2 .* wait for each other in vain \(rank 0 is in all_reduce at .*in recv at"


@case("37", "different collectives", 2 * STALL + 15, 84, node0=VAIN, node1=VAIN)
def unlike(cluster):
    nodes(cluster, FAULT_RANK=1, FAULT="dist.recv(torch.ones(3), 0)", ALLRANKS_STALL_TIMEOUT=STALL)
