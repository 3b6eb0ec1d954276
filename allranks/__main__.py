"""python -m allranks run | explain | doctor | health | simulate"""

import os
import sys


def main(argv: list[str]) -> int:
    from allranks.errors import AllranksError
    from allranks.network import say

    try:
        if argv[:1] == ["explain"] and set(argv[1:]) <= {"--json"}:
            return _explain("--json" in argv)  # in a few milliseconds: no option parser, no torch
        if argv == ["health"]:
            return _health()
        return _command(argv)
    except AllranksError as error:
        say(str(error))
        return error.status


def _explain(as_json: bool) -> int:
    from allranks.resolve import resolve

    world = resolve(os.environ)
    if as_json:
        import json

        print(json.dumps(world._asdict()))
        return 0
    from allranks.explain import explain

    for line in explain(world, os.environ):
        print(line)
    return 0


def _health() -> int:
    from allranks.health import problem

    line = problem()
    print(line or "ok")
    return int(line is not None)


def _command(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    if args.verb == "doctor":
        from allranks.doctor import doctor, list_errors

        if not args.list_errors:
            doctor(args.json, args.png, args.timeout)
        print(list_errors())
        return 0
    if not args.command:
        _parser().error(f"{args.verb}: which command? For example: python -m allranks {args.verb} python train.py")
    if args.verb == "simulate":
        from allranks.simulate import simulate

        return simulate(args.command, args.launcher, args.nnodes, args.nproc_per_node)
    from allranks.launch import run, torchrun_command

    if args.rendezvous_timeout:
        os.environ["ALLRANKS_RENDEZVOUS_TIMEOUT"] = str(args.rendezvous_timeout)

    if args.dry_run:
        import shlex

        print(shlex.join(torchrun_command(args.command, args.nproc_per_node)))
        return 0
    run(args.command, args.nproc_per_node, not args.no_fork)
    raise AssertionError("run never returns")


def _parser():
    import argparse

    from allranks.launchers import LAUNCHERS

    parser = argparse.ArgumentParser(
        prog="python -m allranks",
        description="Distributed PyTorch that starts the first time, on whatever starts it.",
        epilog="Variables: NPROC_PER_NODE (ranks per node), ALLRANKS_LAUNCHER (which launcher is meant where two are "
        "visible), ALLRANKS_RENDEZVOUS_TIMEOUT (seconds to wait for the other nodes, 600), ALLRANKS_STALL_TIMEOUT "
        "(seconds until a rank that does not answer, or keeps the others waiting, ends the job, 600), ALLRANKS_DEBUG "
        "(say which interface was taken). Exit status: that of the first rank that failed, 128 + the signal that "
        "stopped the job, or one of allranks' own (python -m allranks doctor --list-errors).",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="run | explain | doctor | health | simulate")
    run = verbs.add_parser(
        "run",
        help="run a script that expects torchrun's variables, unchanged, under any launcher",
        description="Run a command as every rank of the job: one process per GPU where the launcher starts one per "
        "node, in place where it has started every rank. Ranks of a .py script share one interpreter's imports.",
    )
    run.add_argument(
        "--nproc-per-node", type=_positive, metavar="N", help="ranks on this node (default: its GPUs, or 1)"
    )
    run.add_argument("--no-fork", action="store_true", help="start a fresh interpreter for each rank")
    run.add_argument(
        "--rendezvous-timeout", type=_positive, metavar="SECONDS", help="to wait for the other nodes (default: 600)"
    )
    run.add_argument("--dry-run", action="store_true", help="print the torchrun command for this node; start nothing")
    explain = verbs.add_parser(
        "explain",
        help="show what this process's environment means, and start nothing",
        description="Show what this process's environment means, and start nothing.",
    )
    explain.add_argument("--json", action="store_true", help="one JSON object; null where a field is not known yet")
    doctor = verbs.add_parser(
        "doctor",
        help="say what is wrong on this node, or on all nodes that it is started on",
        description="Check this node and, started on every node by any launcher, what is between them: a row per "
        "check, the speed of each pair, a verdict in the last line. Exit status: that of the worst error, else 0.",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object")
    doctor.add_argument("--list-errors", action="store_true", help="every status and code, what it means, what to do")
    doctor.add_argument("--png", metavar="PATH", help="draw the speed of each pair")
    doctor.add_argument(
        "--timeout",
        type=_positive,
        default=30,
        metavar="SECONDS",
        help="to wait for the other nodes (default: 30)",
    )
    verbs.add_parser(
        "health",
        help="exit 1 where a rank of this container has not moved for two minutes (for probes)",
        description="Exit 1, and say which, where a rank of this container has not moved for two minutes; else 0.",
    )
    simulate = verbs.add_parser(
        "simulate",
        help="run a command on a cluster of local processes",
        description="Start one process per node (or per rank, where the launcher does), each with the variables that "
        "the launcher would have set, all on loopback.",
    )
    names = [row.name for row in LAUNCHERS]
    simulate.add_argument("--launcher", choices=names, default="sing", help="whose variables to wear (default: sing)")
    simulate.add_argument("--nnodes", type=_positive, default=2, metavar="N", help="nodes (default: 2)")
    simulate.add_argument(
        "--nproc-per-node", type=_positive, default=1, metavar="N", help="ranks per node (default: 1)"
    )
    for verb in (run, simulate):
        verb.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD ...", help="the command and its arguments")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
