"""Check that all ranks of a cluster can talk, then train on them: dist.py with its knobs out.

    python /opt/mnist/src/mnist.py --backend nccl --run-training     # what the image runs by default
    python mnist.py                                                  # communication only, in seconds
    python mnist.py --backend gloo --run-training --dir /tmp/run     # with TensorBoard events and metrics.jsonl

The last line of every rank, and exit status 0:

    done rank=1 world_size=2 loss=0.0208 accuracy=0.9946 weights=dd23d660db40 seconds=9.7

Without --run-training it ends after the check, with `done rank=1 world_size=2 sum=3 seconds=0.1`. The options are those
of Kubeflow's pytorch-dist-mnist image, whose manifests run with this image's name put in.
"""

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist import BATCH, PEAK_LR, agree, evaluate, load, net, pick_device, share, step_count, triangle, wrap
from tqdm import tqdm

import allranks


def main():
    allranks.launch()
    args = parse()
    start = time.monotonic()
    if args.dir:  # said now, not after the training
        make_directory(args.dir)
    device = torch.device("cpu") if args.no_cuda else pick_device()
    backend = args.backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type == "cpu":
        backend = "gloo"
        if os.environ["RANK"] == "0":
            instead = "gloo on the CPU instead (with GPUs: docker run --gpus all)"
            print(f"mnist.py: --backend nccl needs a GPU for each rank: {instead}", file=sys.stderr)
    dist.init_process_group(backend)
    total = check_communication(device)
    done = f"done rank={dist.get_rank()} world_size={dist.get_world_size()}"
    if args.run_training:
        torch.manual_seed(args.seed)
        model = net().to(device, memory_format=torch.channels_last)
        loss, accuracy, weights = run_training(model, device, args)
        print(f"{done} loss={loss:.4f} accuracy={accuracy:.4f} weights={weights} {seconds(start)}")
    else:
        print(f"{done} sum={total} {seconds(start)}")
    dist.destroy_process_group()


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run-training", action="store_true", help="train, after the check of the communication")
    add("--backend", default=os.environ.get("BACKEND"), help="nccl with a GPU per rank, else gloo")
    add("--batch-size", type=int, default=BATCH, metavar="N", help=f"samples per step, over all ranks ({BATCH})")
    add("--test-batch-size", type=int, default=500, metavar="N", help="samples per evaluation step, per rank (500)")
    add("--epochs", type=int, default=2, metavar="N", help="(2)")
    add("--lr", type=float, default=PEAK_LR, metavar="LR", help=f"the learning rate's peak ({PEAK_LR})")
    add("--momentum", type=float, default=0.9, metavar="M", help="of SGD, Nesterov's form (0.9)")
    add("--no-cuda", action="store_true", help="stay on the CPU")
    add("--seed", type=int, default=0, metavar="S", help="(0)")
    add("--log-interval", type=int, default=100, metavar="N", help="steps between two lines of the loss (100)")
    add("--save-model", action="store_true", help="rank 0 saves the weights as mnist_cnn.pt, in --dir or here")
    add("--dir", type=Path, metavar="DIR", help="rank 0 writes TensorBoard events and metrics.jsonl there")
    return parser.parse_args()


def check_communication(device):
    """Show where every rank is; return the sum over all ranks of rank + 1, which must come out right."""
    host = os.environ.get("POD_ADDR") or os.environ.get("SING_HOST_ADDR") or socket.gethostname()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everyone = [None] * world_size
    dist.all_gather_object(everyone, f"{host} {device}")
    if rank == 0:
        for other, place in enumerate(everyone):
            print(f"rank {other} of {world_size} is on {place}")
    total = torch.tensor([rank + 1], device=device)
    dist.all_reduce(total)
    if total.item() != world_size * (world_size + 1) // 2:
        sys.exit(f"mnist.py: rank {rank}: 1 + 2 + ... + {world_size} came out as {total.item()} over the network")
    return total.item()


def run_training(model, device, args):
    """Return the last step's loss, the accuracy after the last epoch, and the digest of the weights."""
    images, labels = load("train", device)
    test = load("t10k", device)
    options = {"momentum": args.momentum, "nesterov": args.momentum > 0, "weight_decay": 5e-4}
    ddp, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=args.lr, **options)
    steps = step_count(len(images), args.batch_size)
    schedule = triangle(optimizer, steps * args.epochs)
    record, step = Record(args.dir if dist.get_rank() == 0 else None), 0
    progress = tqdm(total=steps * args.epochs, unit="step", disable=True if dist.get_rank() else None)
    for epoch in range(1, args.epochs + 1):
        for batch in share(len(images)).to(device).tensor_split(steps):
            loss = F.cross_entropy(ddp(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.update()
            step += 1
            if step % args.log_interval == 0:
                record(step, loss=loss.item())
                if dist.get_rank() == 0 and progress.disable:
                    print(f"epoch {epoch} of {args.epochs} step {step} of {steps * args.epochs}: loss={loss:.4f}")
        weights = agree(model)
        accuracy = evaluate(model, *test, batch=args.test_batch_size)
        record(step, accuracy=accuracy)
        if dist.get_rank() == 0:
            progress.write(f"epoch {epoch} of {args.epochs}: accuracy={accuracy:.4f}", file=sys.stdout)
    progress.close()
    record.close()
    if args.save_model and dist.get_rank() == 0:
        torch.save(model.state_dict(), (args.dir or Path()) / "mnist_cnn.pt")
    return loss.item(), accuracy, weights


class Record:
    """TensorBoard events and one JSON object a line; nothing without a directory."""

    def __init__(self, directory):
        self.events = self.lines = None
        if directory:
            from tensorboardX import SummaryWriter

            self.events = SummaryWriter(str(directory))
            self.lines = (directory / "metrics.jsonl").open("w")

    def __call__(self, step, **values):
        if self.lines:
            print(json.dumps({"step": step, **values}), file=self.lines, flush=True)
            for name, value in values.items():
                self.events.add_scalar(name, value, step)

    def close(self):
        if self.lines:
            self.lines.close()
            self.events.close()


def make_directory(path):
    """Make the directory, or end with a line where nothing can be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / f".writable-{os.environ['RANK']}").touch()
        (path / f".writable-{os.environ['RANK']}").unlink()
    except OSError as error:
        sys.exit(f"mnist.py: --dir {path}: {error.strerror}: give a directory that can be written")


def seconds(start):
    return f"seconds={time.monotonic() - start:.1f}"


if __name__ == "__main__":
    main()
