"""Every way in which ranks talk, one function each, and the three ways in which they meet.

    python start.py                                                    # on every node, whatever started it
    torchrun --nproc_per_node=2 --master_addr 172.28.176.19 --master_port 15432 --nnodes 2 --node_rank 0 start.py
    python -m torch.distributed.launch --nproc_per_node=2 start.py
    python start.py --init-method tcp://172.28.176.19:23456            # a free port of rank 0's host
    python start.py --init-method file:///shared/meet                  # a new file that every node sees
    python start.py --bench bandwidth.png                              # how fast; the picture is optional

Shows for each call what went in and what came out, on every rank, after it was checked. The last line of every rank:

    done rank=0 world_size=2 backend=gloo calls=10

Takes 2 s with 2 ranks on 2 CPU cores, nearly all of it imports; the bench 13 s.
"""

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist

import allranks


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init-method", default="env://", metavar="URL", help="env://, tcp://HOST:PORT or file://PATH")
    parser.add_argument("--bench", nargs="?", const="", metavar="PNG", help="measure instead; draw it into PNG")
    parser.add_argument("--local-rank", "--local_rank", help="what torch.distributed.launch adds: launch() reads it")
    args = parser.parse_args()

    allranks.launch(meet=args.init_method == "env://")
    backend = init(args.init_method)
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.bench is not None:
        calls = bench(rank, world_size, device, args.bench)
    else:
        calls = [reduce, all_reduce, gather, all_gather, broadcast, scatter, reduce_scatter, all_to_all, send_recv]
        for call in (*calls, barrier):
            show(call, *call(rank, world_size, device))
        calls = len(calls) + 1
    print(f"done rank={rank} world_size={world_size} backend={backend} calls={calls}")
    dist.destroy_process_group()


# --- meeting ---------------------------------------------------------------------------------------------------------


def init(init_method):
    """Meet the other ranks; return the backend. A GPU is LOCAL_RANK's: RANK goes on counting on the second node."""
    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    backend = os.environ.get("BACKEND", "nccl" if enough else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if init_method == "env://":  # reads MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, as torchrun sets them
        dist.init_process_group(backend)
    else:  # these have to be told; neither needs a local rank: communication does not know about nodes
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # or rank 0 expects torchrun to listen at this address
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    return backend


# --- collectives: all ranks of the group make the same call ----------------------------------------------------------


def reduce(rank, world_size, device):
    """the sum of all, on rank 0 alone"""
    x = torch.tensor([rank + 1], device=device)
    out = x.clone()
    dist.reduce(out, dst=0)
    if rank > 0:
        return x, "(undefined)"  # the others' tensors were used on the way
    assert out.item() == sum(range(1, world_size + 1)), out
    return x, out


def all_reduce(rank, world_size, device):
    """the sum of all, on every rank; waits for all of them, as every collective that ends on every rank does"""
    x = torch.tensor([rank + 1], device=device)
    out = x.clone()
    dist.all_reduce(out)
    assert out.item() == sum(range(1, world_size + 1)), out
    return x, out


def gather(rank, world_size, device):
    """everybody's tensor, on rank 0 alone"""
    x = torch.tensor([rank + 1], device=device)
    parts = [torch.zeros_like(x) for _ in range(world_size)] if rank == 0 else None
    dist.gather(x, parts, dst=0)
    if rank > 0:
        return x, "(nothing)"
    assert torch.cat(parts).tolist() == list(range(1, world_size + 1)), parts
    return x, torch.cat(parts)


def all_gather(rank, world_size, device):
    """everybody's tensor, on every rank"""
    x = torch.tensor([rank + 1], device=device)
    parts = [torch.zeros_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x)
    assert torch.cat(parts).tolist() == list(range(1, world_size + 1)), parts
    return x, torch.cat(parts)


def broadcast(rank, world_size, device):
    """rank 0's tensor, on every rank"""
    x = torch.tensor([7 if rank == 0 else 0], device=device)
    out = x.clone()
    dist.broadcast(out, src=0)
    assert out.item() == 7, out
    return x, out


def scatter(rank, world_size, device):
    """one part of rank 0's tensor for each rank"""
    x = torch.arange(1, world_size + 1, device=device) * 10
    out = torch.zeros(1, dtype=x.dtype, device=device)
    dist.scatter(out, list(x.split(1)) if rank == 0 else None, src=0)
    assert out.item() == (rank + 1) * 10, out
    return x if rank == 0 else "(nothing)", out


def reduce_scatter(rank, world_size, device):
    """the sum of all, one part of it for each rank"""
    x = torch.arange(world_size, device=device) + 10 * rank
    out = torch.zeros(1, dtype=x.dtype, device=device)
    dist.reduce_scatter_tensor(out, x)
    assert out.item() == sum(rank + 10 * other for other in range(world_size)), out
    return x, out


def all_to_all(rank, world_size, device):
    """part i goes to rank i: rows become columns"""
    x = torch.arange(world_size, device=device) + 10 * rank
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x)
    assert out.tolist() == [rank + 10 * other for other in range(world_size)], out
    return x, out


def barrier(rank, world_size, device):
    """nobody leaves before the last one has come"""
    time.sleep(0.02 * rank)
    came = time.monotonic()
    dist.barrier()
    left, everyone = time.monotonic(), [None] * world_size
    dist.all_gather_object(everyone, (socket.gethostname(), came, left))
    mine = [row for row in everyone if row[0] == socket.gethostname()]  # ranks of one host have the same clock
    assert max(came for _, came, _ in mine) <= min(left for _, _, left in mine), mine
    return f"comes {20 * rank} ms late", "leaves when all are there"


# --- point to point: two ranks, each with its own call ---------------------------------------------------------------


def send_recv(rank, world_size, device):
    """a ring: each rank sends to the next and receives from the one before"""
    x = torch.tensor([rank + 1], device=device)
    out = torch.zeros_like(x)
    if world_size > 1:
        following, before = (rank + 1) % world_size, (rank - 1) % world_size
        # both at once: if every rank first sent and then received, all might wait for ever
        calls = [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, out, before)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        assert out.item() == before + 1, out
    return x, out


def show(call, before, after):
    """Rank 0 prints what went in and what came out, for all ranks and in their order."""
    text = [str(value.tolist() if torch.is_tensor(value) else value) for value in (before, after)]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    if dist.get_rank() == 0:
        print(f"{call.__name__}: {call.__doc__}")
        for rank, (came, went) in enumerate(everyone):
            print(f"  rank {rank}: {came} -> {went}")


# --- how fast --------------------------------------------------------------------------------------------------------


def bench(rank, world_size, device, png):
    """Print a table of message sizes; return how many were measured.

    As in nccl-tests: algorithm bandwidth is bytes / time, where the bytes are those of the whole tensor; bus bandwidth
    is what each link has to carry for it, algorithm bandwidth times a factor of the call, so that it can be compared
    with the hardware's whatever the number of ranks. The time is the slowest rank's.
    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    ring = (world_size - 1) / world_size
    calls = {
        "all_reduce": (lambda whole, other, part: dist.all_reduce(whole), 2 * ring),
        "all_gather": (lambda whole, other, part: dist.all_gather_into_tensor(whole, part), ring),
        "reduce_scatter": (lambda whole, other, part: dist.reduce_scatter_tensor(part, whole), ring),
        "all_to_all": (lambda whole, other, part: dist.all_to_all_single(other, whole), ring),
        "broadcast": (lambda whole, other, part: dist.broadcast(whole, src=0), 1),
    }
    if rank == 0:
        print(f"{'call':14} {'bytes':>12} {'time/us':>12} {'algbw GB/s':>12} {'busbw GB/s':>12}")
    rows = []
    for name, (call, factor) in calls.items():
        for exponent in range(10, 31 if device.type == "cuda" else 27, 4):  # 1 KiB, 16 KiB ... 64 MiB or 1 GiB
            whole = torch.zeros(2**exponent // 4 // world_size * world_size, device=device)
            seconds = measure(call, whole)
            size = whole.numel() * 4
            rows.append((name, size, size / seconds / 1e9 * factor))
            if rank == 0:
                print(f"{name:14} {size:12} {seconds * 1e6:12.1f} {size / seconds / 1e9:12.4f} {rows[-1][2]:12.4f}")
    if png and rank == 0:
        draw(rows, world_size, png)
    return len(rows)


def measure(call, whole, aim=0.1):
    """Return the seconds of one call: the slowest rank's mean over about `aim` seconds of calls."""
    tensors = whole, torch.empty_like(whole), whole.chunk(dist.get_world_size())[0].clone()

    def run(times):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            call(*tensors)
        if whole.is_cuda:
            torch.cuda.synchronize()
        seconds = torch.tensor([(time.perf_counter() - began) / times], device=whole.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()

    run(2)  # connections are made by the first call
    return run(max(2, min(1000, int(aim / run(2)))))


def draw(rows, world_size, png):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name in dict.fromkeys(row[0] for row in rows):
        sizes, speeds = zip(*[row[1:] for row in rows if row[0] == name], strict=True)
        axes.loglog(sizes, speeds, marker="o", label=name)
    axes.set(xlabel="bytes", ylabel="bus bandwidth, GB/s", title=f"{dist.get_backend()}, {world_size} ranks")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(png)


if __name__ == "__main__":
    main()
