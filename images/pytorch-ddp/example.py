"""The smallest correct step of distributed data-parallel training, for torchrun. Plain PyTorch, to start from.

    ./serve.sh                                   # torchrun with a rank per GPU, on this node or on all of a job's
    torchrun --nproc-per-node 2 example.py       # the same by hand

The last line of every rank, and exit status 0:

    done rank=0 world_size=2 device=cpu loss=1.2458->0.0455 weights=d2f012f10afa

Takes 6 s with 2 ranks on 2 CPU cores, nearly all of it imports.
"""

import argparse
import hashlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    check_environment()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="(20)")
    steps = parser.parse_args().steps

    device, backend = pick_device()
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)  # every rank has its own samples and its own first weights: DDP takes those of rank 0
    inputs = torch.randn(64, 10, device=device)
    labels = inputs.roll(1, dims=1)[:, :5]
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.03)

    losses = []
    for _ in range(steps):
        loss = F.mse_loss(ddp(inputs), labels)
        optimizer.zero_grad()
        loss.backward()  # here DDP averages the gradients over all ranks
        optimizer.step()
        losses.append(loss.item())

    weights = digest(model)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, weights)
    if len(set(everyone)) > 1:
        sys.exit(f"example.py: the ranks ended with different weights: {everyone}")
    if not losses[-1] < losses[0]:
        sys.exit(f"example.py: rank {rank}: the loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
    sys.stdout.write(  # in one piece: under torchrun print() writes a line's end by itself, and two ranks' lines mix
        f"done rank={rank} world_size={world_size} device={device} "
        f"loss={losses[0]:.4f}->{losses[-1]:.4f} weights={weights}\n"
    )
    if backend == "nccl":  # gloo's group ends with the process: torch 2.5 can hang when it is destroyed
        dist.destroy_process_group()


def check_environment():
    """End with a line where what torchrun gives each rank is not there."""
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        sys.exit(f"example.py: {', '.join(missing)} not set: start it with torchrun --nproc-per-node 2 example.py")


def pick_device():
    """A GPU of its own for each rank of this node, and nccl; else the CPU, and gloo. BACKEND overrides the backend.

    The index is LOCAL_RANK: RANK counts over all nodes, and the second node's GPUs start at 0 again.
    """
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < local_world_size:
        return torch.device("cpu"), os.environ.get("BACKEND", "gloo")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device, os.environ.get("BACKEND", "nccl")


def digest(model):
    """The same 12 characters on two ranks if, and only if, all their weights are the same."""
    weights = [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()[:12]


if __name__ == "__main__":
    main()
