"""What `python -m allranks doctor` finds on this node and between all nodes: a row per check, a verdict, a status.

Every process that the launcher has started looks at its own node, meets the others by the handshake, tries the
backends, and posts its rows into the store; rank 0 collects and prints them, so that they are seen even where no
collective works. Nothing outlives the deadline: a watchdog prints what is known by then.
"""

import json
import os
import sys
import threading
import time
from typing import NoReturn

from allranks import handshake, machine, pairs
from allranks.checks import ERROR, LOCAL, OK, WARNING, Finding, Member, first_line, launcher
from allranks.errors import BY_CODE, CATALOGUE, AllranksError, PeerUnreachable, RankFailed, Stalled
from allranks.network import say
from allranks.pairs import GROUP, PAIRS
from allranks.resolve import resolve

REST = 30.0  # seconds for everything besides waiting for the others
LINGER = 0.5  # seconds by which others outlive rank 0, whose words a launcher that ends them all should let through
UNITS = ("latency_microseconds", "bandwidth_GB_per_s")
LATE = (RankFailed.code, Stalled.code, PeerUnreachable.code)  # what a member says that another has let down


def doctor(as_json: bool = False, png: str | None = None, timeout: float = 30.0) -> NoReturn:
    """Check this node, meet the others and check what is between them; print the rows, end with the worst status.

    png: where to draw the pairs. timeout: seconds to wait for the others; everything else has REST seconds.
    """
    machine.die_with_parent()
    machine.ensure_temporary_directory()
    try:
        world, problem = resolve(os.environ), None
    except AllranksError as error:
        world, problem = None, error
    me = Member(world)
    me.watchdog = threading.Timer(timeout + REST, _too_late, (me, as_json, timeout + REST))
    me.watchdog.daemon = True
    me.watchdog.start()
    met = _examine(me, problem, timeout)
    if met is None:  # alone, or on its own: it speaks for itself
        me.watchdog.cancel()
        if me.index:
            time.sleep(LINGER)
        _end(_conclude([me.report()], as_json, png, sys.stderr if me.index else sys.stdout))
    try:
        status = _tell_rank_0(me, met.store, as_json, png)
    except RuntimeError:
        end = "see what its log ends with"
        me.fail("report", RankFailed(f"{me.kind} 0 has gone, and its store", f"{me.kind} 0 to print all findings", end))
        status = _conclude([me.report()], as_json, None, sys.stderr)
    _end(status)


def list_errors() -> str:
    """All errors as a table of four columns: status, code, meaning, what to do."""
    rows = [(str(cls.status), cls.code, " ".join(cls.__doc__.split()), cls.todo) for cls in CATALOGUE]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows)


def _examine(me: Member, problem: AllranksError | None, timeout: float) -> handshake.Met | None:
    """Run all checks that can be run; return the handshake's result, None where nobody was met."""
    may_meet = me.look("launcher", launcher, me, problem)
    for name, check in LOCAL.items():
        passed = me.look(name, check, me)
        may_meet &= passed or name != "port"
    if may_meet and me.size > 1:
        met: list[handshake.Met] = []
        if me.look("meeting", pairs.meet, me, timeout, met):
            me.look("names", pairs.names, [host["name"] for host in met[0].hosts])
            local = met[0].local[0] if me.kind == "rank" else 0
            pairs.try_backends(me, met[0].store, met[0].peer, local, met[0].no_nccl)
            return met[0]
    elif may_meet:
        import torch.distributed as dist

        ranks = (me.world.world_size or me.nproc) if me.kind == "rank" else me.nproc
        me.shape = pairs.shape(1, ranks)
        pairs.try_backends(me, dist.HashStore(), None, 0, "")
    return None


def _tell_rank_0(me: Member, store, as_json: bool, png: str | None) -> int:
    """Post this member's rows; rank 0 prints everybody's. Return the status of the whole; RuntimeError: lost rank 0."""
    store.set(f"doctor/report/{me.index}", json.dumps(me.report()))
    if me.index:
        for found in me.findings:
            if found.level == ERROR:
                say(f"{found.code}: {found.seen}")
        if not pairs.wait(lambda: store.check(["doctor/verdict"]), REST):
            raise RuntimeError
        status = int(store.get("doctor/verdict"))
        store.add("doctor/left", 1)
        time.sleep(LINGER if status else 0)
        return status
    keys = [f"doctor/report/{index}" for index in range(me.size)]
    came = [key for index, key in enumerate(keys) if store.check([f"doctor/here/{index}"])]
    pairs.wait(lambda: store.check(came), GROUP + 2)  # who waits for a dead one hears of it after GROUP seconds
    reports = [json.loads(store.get(key)) if store.check([key]) else _absent(me, key) for key in keys]
    me.watchdog.cancel()
    status = _conclude(reports, as_json, png, sys.stdout)
    store.set("doctor/verdict", str(status))
    here = sum("absent" not in report for report in reports)
    pairs.wait(lambda: store.add("doctor/left", 0) >= here - 1, 3.0)  # the store ends with this process
    return status


def _absent(me: Member, key: str) -> dict:
    index = int(key.rpartition("/")[2])
    error = RankFailed(f"{me.kind} {index} met the others and never reported", "its findings")
    found = Finding("report", ERROR, str(error).partition(": ")[2], error.code)
    return {"name": f"{me.kind} {index}", "index": index, "findings": [found._asdict()], "pairs": {}, "absent": True}


def _conclude(reports: list[dict], as_json: bool, png: str | None, out) -> int:
    """Print all there is, the verdict last; return the status."""
    tables = _matrices(reports)
    if png and out is sys.stdout:
        reports[0]["findings"].append(Finding("png", *_draw(tables, png))._asdict())
    verdict, status = _judge(reports)
    if as_json and out is sys.stdout:
        members = [{name: report[name] for name in ("name", "index", "findings")} for report in reports]
        print(json.dumps({"verdict": verdict, "status": status, "members": members, "pairs": tables}))
        return status
    for report in reports:
        _print_rows(report, reports[0], out)
    for backend, by_unit in tables.items():
        for unit, table in by_unit.items():
            print(f"{backend}, {unit.replace('_', ' ')}", file=out)
            print("      " + "".join(f"{other:9}" for other in range(len(table))), file=out)
            for one, line in enumerate(table):
                cells = "".join(f"{'-' if cell is None else format(cell, '.5g'):>9}" for cell in line)
                print(f"{one:6}{cells}", file=out)
    print(verdict, file=out)
    return status


def _print_rows(report: dict, first: dict, out) -> None:
    """The rows of a member; those that are well and read as the first member's are only counted."""
    print(report["name"], file=out)
    same = [row for row in report["findings"] if row["level"] == OK and row in first["findings"]]
    for row in report["findings"]:
        if row not in same or report is first:
            code = f"{row['code']}: " if row["code"] else ""
            print(f"  {row['check']:16} {row['level']:8} {code}{row['seen']}", file=out)
    if same and report is not first:
        print(f"  {f'{len(same)} more rows':16} ok       as on {first['name']}", file=out)


def _judge(reports: list[dict]) -> tuple[str, int]:
    """The verdict, and the status of the error that says most."""
    rows = [row for report in reports for row in report["findings"]]
    errors = [row for row in rows if row["level"] == ERROR]
    warnings = sum(row["level"] == WARNING for row in rows)
    counts = [
        f"{count} {word}{'s' * (count > 1)}" for count, word in ((len(errors), ERROR), (warnings, WARNING)) if count
    ]
    if errors:
        worst = min(errors, key=lambda row: row["code"] in LATE)
        return f"doctor: {', '.join(counts)}: {worst['code']}: {worst['seen']}", BY_CODE[worst["code"]].status
    return f"doctor: {', '.join([*(counts or ['ok']), reports[0]['shape']])}", 0


def _matrices(reports: list[dict]) -> dict[str, dict[str, list]]:
    """backend -> {"latency_microseconds", "bandwidth_GB_per_s"} -> a row per member; None where not measured."""
    found: dict[str, dict[str, list]] = {}
    size = min(len(reports), PAIRS)
    for report in reports:
        for backend, rows in report["pairs"].items():
            empty = {unit: [[None] * size for _ in range(size)] for unit in UNITS}
            tables = found.setdefault(backend, empty)
            for one, other, *values in rows:
                for unit, value in zip(UNITS, values, strict=True):
                    tables[unit][one][other] = tables[unit][other][one] = round(value, 4)
    return found


def _draw(pairs: dict[str, dict[str, list]], path: str) -> tuple[str, str]:
    """A heat map for each table, side by side."""
    if not pairs:
        return OK, "no picture: no pair was measured"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return WARNING, "no picture: matplotlib is not installed (pip install matplotlib)"
    tables = [
        (f"{backend}, {unit.replace('_', ' ')}", table) for backend in pairs for unit, table in pairs[backend].items()
    ]
    figure = Figure(figsize=(6 * len(tables), 5), layout="constrained")
    for axes, (title, table) in zip(figure.subplots(1, len(tables)), tables, strict=True):
        image = axes.imshow([[float("nan") if cell is None else cell for cell in line] for line in table])
        axes.set(title=title, xticks=range(len(table)), yticks=range(len(table)))
        figure.colorbar(image)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: an ending that it does not know
        return WARNING, f"no picture: {first_line(error)}"
    return OK, path


def _too_late(me: Member, as_json: bool, deadline: float) -> None:
    """Called by the watchdog, from another thread: say what is known, and end."""
    error = Stalled(
        f"not done after {deadline:.0f} s", "all checks within that time", "see what the last row waits for"
    )
    me.fail("deadline", error)
    _end(_conclude([me.report()], as_json, None, sys.stderr if me.index else sys.stdout))


def _end(status: int) -> NoReturn:
    """Without the interpreter's teardown, which gloo's threads can hang or abort (see mend)."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
