"""What allranks says when it stops: every error is one line with a stable code and an exit status of its own.

Statuses lie between 64 and 99: never 0, never Python's own 1 and 2, never 128 + a signal.
"""


class AllranksError(Exception):
    """One line: what was seen, what was expected, what to do.

    `code` and `status` belong to the class and never change their meaning; scripts may rely on both.
    """

    code = "error"
    status = 64

    def __init__(self, seen: str, expected: str, todo: str):
        line = f"{self.code}: {seen}; expected {expected}; {todo}"  # a variable's value may hold anything
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in line))


class MissingVariable(AllranksError):
    """A launcher was recognised, and one of its variables is not there."""

    code = "missing-variable"
    status = 65


class InvalidVariable(AllranksError):
    """A variable is empty, not a number, or out of its range."""

    code = "invalid-variable"
    status = 66


class LauncherConflict(AllranksError):
    """Two launchers are visible at once and disagree; which one is meant is the user's to say."""

    code = "launcher-conflict"
    status = 67


class MasterIsLoopback(AllranksError):
    """Several nodes, and the master's address leads every one of them to itself."""

    code = "master-is-loopback"
    status = 68


class MasterUnresolved(AllranksError):
    """The master's name never resolved before the deadline."""

    code = "master-unresolved"
    status = 69


class MasterRefused(AllranksError):
    """The master's host answers, but nothing listens on the port."""

    code = "master-refused"
    status = 70


class MasterSilent(AllranksError):
    """The master's name resolves, and nothing answers there at all."""

    code = "master-silent"
    status = 71


class PortTaken(AllranksError):
    """Another process of this host listens on the port that rank 0 should open."""

    code = "port-taken"
    status = 72


class RendezvousFailed(AllranksError):
    """The nodes did not all meet before the deadline, or lost each other while meeting."""

    code = "rendezvous-failed"
    status = 73


class CannotStart(AllranksError):
    """There is no script or command that could be started once per rank."""

    code = "cannot-start"
    status = 74
