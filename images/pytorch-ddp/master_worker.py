"""The master-worker mode: one master plans, and queues every job on tensors that live on the workers.

    python master_worker.py                                                      # a master and 2 workers, here
    WORLD_SIZE=3 RANK=0 MASTER_PORT=29500 python master_worker.py                # on node0
    WORLD_SIZE=3 RANK=1 MASTER_ADDR=node0:29500 python master_worker.py          # on node1; RANK=2 on node2

The workers hold the rows of a matrix; the master finds its largest eigenvalue, which is known, by power iteration.
The last line of the master and of each worker:

    done rank=0 world_size=3 role=master jobs=16 eigenvalue=422071.8 expected=422071.8
    done rank=1 world_size=3 role=worker jobs=8

Takes 3 s on 2 CPU cores, nearly all of it imports.

Why it does not scale: every job is planned, and every vector sent and received, by one process. Its network link
carries what all workers need together, and they wait for it: twice the workers, twice the traffic in the same place.
It is good for a few machines, and for work that is not alike (a parameter server, agents that play). To train one model
on many ranks let each queue its own work and exchange by collectives, whose traffic per rank does not grow: start.py
shows them, example.py what DistributedDataParallel makes of them.
"""

import math
import os
import sys
import warnings

import torch
from torch.distributed import rpc

import allranks

SIZE = 1020  # rows and columns of the matrix
jobs = 0  # queued by the master; done by a worker


def main():
    allranks.launch(nproc_per_node=int(os.environ.get("NPROC_PER_NODE", 3)))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        sys.exit("master_worker.py: WORLD_SIZE is 1: expected a master and at least one worker; start more ranks")
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch 2.5 warns of its own call in init_rpc
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size)
    eigenvalue = plan([f"rank{worker}" for worker in range(1, world_size)]) if rank == 0 else None
    rpc.shutdown()  # a worker serves until the master, too, has come here

    done = f"done rank={rank} world_size={world_size} role={'worker' if rank else 'master'} jobs={jobs}"
    if rank == 0:
        expected = 1 / (4 * math.sin(math.pi / (4 * SIZE + 2)) ** 2)
        if abs(eigenvalue / expected - 1) > 1e-6:
            sys.exit(f"master_worker.py: the eigenvalue came out as {eigenvalue}, expected {expected}")
        done += f" eigenvalue={eigenvalue:.1f} expected={expected:.1f}"
    print(done)


# --- on the master ---------------------------------------------------------------------------------------------------


def plan(workers):
    """Return the matrix's largest eigenvalue. No row of the matrix ever comes here, but every vector does."""
    shares = torch.arange(SIZE).tensor_split(len(workers))
    blocks = [rpc.remote(worker, make_rows, (rows,)) for worker, rows in zip(workers, shares, strict=True)]
    count(len(blocks))
    x, eigenvalue = torch.ones(SIZE, dtype=torch.float64), 0.0
    while True:
        # queued on all workers at once; nothing has been waited for until here, not even for the blocks to be made
        queued = [rpc.rpc_async(block.owner(), multiply, (block, x)) for block in blocks]
        count(len(queued))
        y = torch.cat(torch.futures.wait_all(queued))
        before, eigenvalue = eigenvalue, (y.norm() / x.norm()).item()
        if abs(eigenvalue - before) < 1e-9 * eigenvalue:
            return eigenvalue
        x = y / y.norm()


# --- on a worker, when the master says so ----------------------------------------------------------------------------


def make_rows(rows):
    """These rows of the matrix whose element (i, j) is min(i, j), counted from 1; (N,) -> (N, SIZE)."""
    count(1)
    return torch.minimum(rows[:, None], torch.arange(SIZE)).double() + 1


def multiply(block, x):
    """block: where the rows are, which is here; waits until they have been made."""
    count(1)
    return block.local_value() @ x


def count(new):
    global jobs
    jobs += new


if __name__ == "__main__":
    main()
