"""What allranks says when it stops: every error is one line with a stable code and an exit status of its own.

The classes are the table: code, exit status, meaning (the docstring), what to do where nothing better is known.
Statuses lie between 64 and 99: never 0, never Python's own 1 and 2, never 128 + a signal.
"""


class AllranksError(Exception):
    """One line: what was seen, what was expected, what to do.

    `code` and `status` belong to the class and never change their meaning; scripts may rely on both.
    """

    code = "error"
    status = 64
    todo = "read the line"

    def __init__(self, seen: str, expected: str, todo: str | None = None):
        self.parts = (seen, expected, todo or self.todo)
        line = f"{self.code}: {seen}; expected {expected}; {self.parts[2]}"  # a variable's value may hold anything
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in line))


class MissingVariable(AllranksError):
    """a launcher was recognised, and one of its variables is not there"""

    code = "missing-variable"
    status = 65
    todo = "set it where the job is started"


class InvalidVariable(AllranksError):
    """a variable is empty, not a number, or out of its range"""

    code = "invalid-variable"
    status = 66
    todo = "correct it where the job is started"


class LauncherConflict(AllranksError):
    """two launchers are visible and disagree"""

    code = "launcher-conflict"
    status = 67
    todo = "unset the variables of one, or name the other in ALLRANKS_LAUNCHER"


class MasterIsLoopback(AllranksError):
    """several nodes, and the master's address is 127.0.0.1"""

    code = "master-is-loopback"
    status = 68
    todo = "set MASTER_ADDR to node 0's name or address"


class MasterUnresolved(AllranksError):
    """the master's name never resolved"""

    code = "master-unresolved"
    status = 69
    todo = "check it; on Kubernetes the Service must be headless, select the pods and publish addresses not ready yet"


class MasterRefused(AllranksError):
    """the master's host answers, its port is closed"""

    code = "master-refused"
    status = 70
    todo = "see whether rank 0 is running and has the same MASTER_PORT"


class MasterSilent(AllranksError):
    """the master's host does not answer"""

    code = "master-silent"
    status = 71
    todo = "see whether the node is up, and whether a firewall or network policy drops the port"


class PortTaken(AllranksError):
    """rank 0's port belongs to another process"""

    code = "port-taken"
    status = 72
    todo = "end the process that holds it, or set MASTER_PORT to another one on every node"


class RendezvousFailed(AllranksError):
    """the nodes did not all meet in time"""

    code = "rendezvous-failed"
    status = 73
    todo = "see on each node whether it started, and what its log ends with"


class CannotStart(AllranksError):
    """there is nothing that could be started once per rank"""

    code = "cannot-start"
    status = 74
    todo = "correct the command"


class RankTwice(AllranksError):
    """two processes say that they are the same rank"""

    code = "rank-twice"
    status = 75
    todo = "give each process a rank of its own, and see that no earlier job still runs"


class WorldMismatch(AllranksError):
    """the ranks disagree on how many they are"""

    code = "world-mismatch"
    status = 76
    todo = "set the same on every node"


class VersionMismatch(AllranksError):
    """the ranks run different versions of torch or NCCL"""

    code = "version-mismatch"
    status = 77
    todo = "start the same image on every node"


class JobMismatch(AllranksError):
    """two jobs meet at one address and port"""

    code = "job-mismatch"
    status = 78
    todo = "give one of them another MASTER_PORT"


class NoInterface(AllranksError):
    """GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface of this host"""

    code = "no-interface"
    status = 79
    todo = "unset it: the interface on the way to the master is taken then"


class PeerUnreachable(AllranksError):
    """hosts reach the master, but not each other"""

    code = "peer-unreachable"
    status = 80
    todo = "open all ports between the nodes: a firewall, a NetworkPolicy or a service mesh's sidecar is in between"


class GpuUnusable(AllranksError):
    """no GPU for this rank, one for two ranks, or a driver that is too old"""

    code = "gpu-unusable"
    status = 81
    todo = "start one rank per GPU, or train with gloo"


class RankFailed(AllranksError):
    """another rank failed first"""

    code = "rank-failed"
    status = 82
    todo = "see that rank's own last lines"


class OutOfMemory(AllranksError):
    """a rank ran out of memory"""

    code = "out-of-memory"
    status = 83
    todo = "use a smaller batch or model, fewer ranks per node, or raise the limit"


class Stalled(AllranksError):
    """a rank has not answered, or has kept the others waiting, for too long"""

    code = "stalled"
    status = 84
    todo = "see what it was doing; ALLRANKS_STALL_TIMEOUT sets the seconds"


class CollectiveMismatch(AllranksError):
    """the ranks call different collectives"""

    code = "collective-mismatch"
    status = 85
    todo = "make every rank call the same collectives in the same order, with the same shapes"


CATALOGUE = tuple(AllranksError.__subclasses__())
BY_CODE = {cls.code: cls for cls in CATALOGUE}
