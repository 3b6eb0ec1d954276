"""Train a digit classifier on every rank of a cluster. One line starts it anywhere: `allranks.launch()`.

    python dist.py                                    # on every node, whatever started it
    python -m allranks simulate --nproc-per-node 2 python dist.py      # a cluster of 2 nodes on this machine
    torchrun --nproc-per-node 2 dist.py

The last line of every rank, and exit status 0:

    done rank=0 world_size=4 loss=0.0176 accuracy=0.9933 weights=febf61a213b8 seconds=12.8

30,000 weights, 2 epochs: 99.3 % of the 10,000 test digits are read rightly, after 9 s on 2 CPU cores with 2 ranks.
"""

import argparse
import gzip
import hashlib
import os
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import allranks

DATA = Path(__file__).resolve().parent / "data"
BATCH = 256  # samples per step over all ranks, so that the result hardly depends on how many there are
PEAK_LR = 0.3


def main():
    allranks.launch()  # from here on RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR... are what torchrun sets
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default=os.environ.get("BACKEND"), help="nccl with a GPU per rank, else gloo")
    args = parser.parse_args()

    start = time.monotonic()
    device = pick_device()
    dist.init_process_group(args.backend or ("nccl" if device.type == "cuda" else "gloo"))
    torch.manual_seed(args.seed)
    model = net().to(device, memory_format=torch.channels_last)
    loss = train(wrap(model), *load("train", device), args.epochs)
    weights = agree(model)
    accuracy = evaluate(model, *load("t10k", device))
    print(
        f"done rank={dist.get_rank()} world_size={dist.get_world_size()} loss={loss:.4f} accuracy={accuracy:.4f} "
        f"weights={weights} seconds={time.monotonic() - start:.1f}"
    )
    dist.destroy_process_group()


def net():
    """(N, 1, 24, 24) images -> (N, 10) logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, stride=2, padding=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, kernel_size=3, padding=1, bias=False),
        nn.MaxPool2d(2),  # before the normalisation, which has a quarter of the work then
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, kernel_size=3, padding=1, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64 * 3 * 3, 10),
    )


def wrap(model):
    # batch norm does not use its running statistics in training: `agree` averages them once, no step has to send them
    return DistributedDataParallel(model, broadcast_buffers=False)


def train(model, images, labels, epochs):
    """Return the mean loss of the last 50 steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps, losses = step_count(len(images), BATCH), []
    schedule = triangle(optimizer, steps * epochs)
    # disable=None: a bar on a terminal, nothing in a log
    progress = tqdm(total=steps * epochs, unit="step", disable=True if dist.get_rank() else None)
    for epoch in range(epochs):
        for batch in share(len(images)).to(images.device).tensor_split(steps):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            progress.update()
        if dist.get_rank() == 0 and progress.disable:
            print(f"epoch {epoch + 1} of {epochs}: loss={torch.stack(losses[-50:]).mean():.4f}")
    progress.close()
    return torch.stack(losses[-50:]).mean().item()


def step_count(samples, batch):
    """How many steps an epoch has, on every rank alike: no rank ever waits for one that has run out of samples."""
    return max(1, min(samples // batch, samples // dist.get_world_size()))


def share(samples):
    """This rank's samples of a new epoch, shuffled: every sample is some rank's, shares differ by at most one."""
    order = torch.randperm(samples)  # the same on every rank, since they share a seed
    return order[dist.get_rank() :: dist.get_world_size()]


def triangle(optimizer, steps, peak=0.3):
    """The learning rate rises over the first 30 % of the steps, then falls to almost nothing."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (peak * steps), (steps - step) / ((1 - peak) * steps))
    )


@torch.no_grad()
def evaluate(model, images, labels, batch=500):
    """Return the share of right answers; each image is judged by exactly one rank."""
    model.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    right = torch.zeros(2, dtype=torch.long, device=images.device)
    for image, label in zip(images[mine].split(batch), labels[mine].split(batch), strict=True):
        right += torch.stack([(model(image).argmax(1) == label).sum(), torch.ones_like(label).sum()])
    model.train()
    dist.all_reduce(right)
    correct, judged = right.tolist()
    assert judged == len(images), f"{judged} of {len(images)} images were judged"
    return correct / judged


@torch.no_grad()
def agree(model):
    """Average the running statistics; return a digest of all weights, which must be the same on every rank."""
    for buffer in model.buffers():
        dist.all_reduce(buffer)
        buffer.copy_(buffer / dist.get_world_size())
    state = hashlib.sha256()
    for value in model.state_dict().values():
        state.update(value.cpu().contiguous().numpy().tobytes())
    weights, everyone = state.hexdigest()[:12], [""] * dist.get_world_size()
    dist.all_gather_object(everyone, weights)
    if len(set(everyone)) > 1:
        sys.exit(f"the ranks ended with different weights: {dict(enumerate(everyone))}")
    return weights


def load(name, device):
    """Return ((N, 1, 24, 24) float images around 0, (N,) labels) on the device; nothing is downloaded."""
    pixels = torch.frombuffer(read(f"{name}-images-idx3-ubyte"), dtype=torch.uint8, offset=16).to(device)
    labels = torch.frombuffer(read(f"{name}-labels-idx1-ubyte"), dtype=torch.uint8, offset=8).to(device)
    inner = pixels.view(-1, 1, 28, 28)[:, :, 2:-2, 2:-2]  # the digits keep 4 pixels from the border, nearly all of them
    images = inner.to(torch.float32, memory_format=torch.channels_last)
    return images.sub_(45.3).div_(88.2), labels.long()  # the training set's mean and deviation


def read(name):
    """Return the content of data/NAME.gz; end with a line where it is not the published one."""
    expected = dict(line.split()[::-1] for line in (DATA / "SHA256SUMS").read_text().splitlines())[name]
    content = b""
    try:
        content = gzip.decompress((DATA / f"{name}.gz").read_bytes())
        seen = f"SHA-256 {hashlib.sha256(content).hexdigest()}"
    except (OSError, EOFError, zlib.error) as error:
        seen = f"{type(error).__name__}: {error}"
    if not seen.endswith(expected):
        sys.exit(f"{DATA / name}.gz: expected SHA-256 {expected} once unpacked, found {seen}; restore the file")
    return bytearray(content)


def pick_device():
    """One GPU per rank; the CPU where there are fewer."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() > local_rank:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


if __name__ == "__main__":
    main()
