"""How the ranks that mpirun has started find their master, where nobody has set MASTER_ADDR."""

import os
import socket
from collections.abc import Mapping

from allranks.errors import MissingVariable
from allranks.network import free_port, own_name
from allranks.resolve import World


def find_master(world: World, environ: Mapping[str, str]) -> World:
    """Fill in master_addr, and with MPICH a port that is free on rank 0's host. Raises MissingVariable."""
    if world.launcher == "openmpi":
        return world._replace(master_addr=_open_mpi(world, environ))
    try:
        host, port = _mpich(world, environ).rsplit(":", 1)
    except (OSError, KeyError):  # no socket any more, or one that speaks otherwise
        raise _missing("its process manager does not answer on PMI_FD", "-genv") from None
    return world._replace(master_addr=host, master_port=int(port))


def _open_mpi(world: World, environ: Mapping[str, str]) -> str:
    """The host that mpirun was started on, whose addresses every rank knows: rank 0 is there unless told otherwise."""
    _, _, addresses = environ.get("OMPI_MCA_orte_hnp_uri", "").partition("tcp://")
    known = addresses.partition(":")[0].split(",")
    if known == [""]:
        raise _missing("this Open MPI does not say where mpirun was started", "-x")
    if world.rank == 0 and not any(map(_is_own, known)):
        raise _missing(f"rank 0 is on {own_name()}, not where mpirun was started ({', '.join(known)})", "-x")
    return known[0]


def _is_own(address: str) -> bool:
    """Whether packets to the address would leave from that very address; sends none."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            return probe.getsockname()[0] == address
        except OSError:
            return False


def _mpich(world: World, environ: Mapping[str, str]) -> str:
    """Rank 0 tells the others host:port through the process manager, by the simple form of its protocol.

    A script that uses MPI itself has to be given MASTER_ADDR: a process can join its manager only once.
    Source: https://github.com/pmodels/mpich, src/pmi/src/pmi_wire.c (version 1)
    """
    if not environ.get("PMI_FD", "").isdecimal():
        raise _missing("its process manager offers no PMI_FD to ask for it", "-genv")
    with socket.socket(fileno=os.dup(int(environ["PMI_FD"]))) as manager, manager.makefile("rw") as stream:

        def ask(line: str) -> dict[str, str]:
            stream.write(f"cmd={line}\n")
            stream.flush()
            return dict(word.partition("=")[::2] for word in stream.readline().split())

        ask("init pmi_version=1 pmi_subversion=1")
        key = f"kvsname={ask('get_my_kvsname')['kvsname']} key=allranks"
        if world.rank == 0:
            port = world.master_port if "MASTER_PORT" in environ else free_port()
            # the name by which mpirun has reached this host is one that the others are likely to know, too
            ask(f"put {key} value={environ.get('MPIR_CVAR_CH3_INTERFACE_HOSTNAME') or own_name()}:{port}")
        ask("barrier_in")
        found = ask(f"get {key}")["value"]
        ask("finalize")
    return found


def _missing(why: str, option: str) -> MissingVariable:
    return MissingVariable(
        f"MASTER_ADDR not set, and {why}",
        "the address of rank 0's host",
        f"give it to mpirun: {option} MASTER_ADDR{'=' if option == '-x' else ' '}HOST",
    )
