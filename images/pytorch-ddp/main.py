"""Seven ways to train one model on several devices; each must end with the weights that one process alone would get.

    python main.py                          # the first three
    python main.py all                      # all seven
    python main.py checkpoint pipeline      # these two

    basic            DDP: every rank has the whole model and a share of the samples
    checkpoint       rank 0 saves, every rank loads, and training goes on as if it had never stopped
    model_parallel   DDP over a model that lies on two devices
    fsdp             FSDP2: every rank has a share of the samples and keeps a share of every weight
    reshard          sharded weights and optimizer, saved by all ranks, loaded by half as many
    tensor_parallel  every rank computes a part of every layer, for all samples
    pipeline         every rank has a few layers; the samples pass through them in micro-batches

It starts its own ranks, one per GPU, up to 4. With fewer than 2 GPUs (model_parallel, reshard: 4) CPU ranks stand in,
and a line says so. What this torch cannot do is said, too (2.5 does fsdp on GPUs only); asked for by name, it ends with
status 1. The last lines of `python main.py`, after 4 s on 2 CPU cores (`all`: 8 s), and exit status 0:

    done demo=checkpoint world_size=4 device=cpu backend=gloo loss=0.1092 seconds=0.4
    model_parallel: made for 4 GPUs, 0 here: runs on 4 CPU devices
    done demo=model_parallel world_size=2 device=cpu backend=gloo loss=0.1228 seconds=0.1
"""

import argparse
import os
import signal
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5 has it here
    from torch.distributed._composable.fsdp import fully_shard

STEPS = 20
TOLERANCE = 1e-5  # between weights below 1: in parts, the same sums are added up in another order


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(DEMOS)} or all")
    names = parser.parse_args().names or ["basic", "checkpoint", "model_parallel"]
    if unknown := set(names) - {*DEMOS, "all"}:
        parser.error(f"no demonstration is called {', '.join(sorted(unknown))}: there are {', '.join(DEMOS)} and all")
    if "LOCAL_RANK" in os.environ:
        print("main.py starts its own ranks: python main.py", file=sys.stderr)
        sys.exit(2)
    sys.stdout.reconfigure(line_buffering=True)  # a forked rank would print what waits in the buffer once more
    with tempfile.TemporaryDirectory(prefix="pytorch-ddp-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # for what torch leaves behind, too
        missing = [name for name in (DEMOS if "all" in names else names) if not run(name)]
    if missing and "all" not in names:
        sys.exit(f"main.py: cannot run here: {', '.join(missing)}")


def run(name):
    """Start the ranks of a demonstration, wait for them, print its line; return whether it could run here."""
    start, folder, world_sizes = time.monotonic(), tempfile.mkdtemp(), []
    gpus = min(4, torch.cuda.device_count())
    if gpus >= 2 * max(devices_per_rank for _, devices_per_rank in DEMOS[name]):  # always 2 ranks or more
        backend, devices = "nccl", [torch.device("cuda", i) for i in range(gpus)]
    else:
        backend, devices = "gloo", [torch.device("cpu")] * 4
    device = devices[0].type
    if gpus < 4:
        print(f"{name}: made for 4 GPUs, {gpus} here: runs on {len(devices)} {device.upper()} devices")

    # Forked ranks share our imports. They would hang had this process used OpenMP's threads, and fail had it used CUDA:
    # so it touches no tensor.
    method = "fork" if device == "cpu" and sys.platform == "linux" else "spawn"
    for part, devices_per_rank in DEMOS[name]:
        world_sizes.append(len(devices) // devices_per_rank)
        args = (part, world_sizes[-1], devices, backend, folder)
        try:
            mp.start_processes(be_rank, args, nprocs=world_sizes[-1], daemon=True, start_method=method)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            sys.exit(f"main.py: {name} failed: {str(error).strip()}")

    result = Path(folder, "result").read_text()
    if not result.startswith("loss="):
        print(f"{name}: not run: {result}")
        return False
    world_size, seconds = "->".join(map(str, world_sizes)), time.monotonic() - start
    print(f"done demo={name} {world_size=!s} {device=!s} {backend=!s} {result} {seconds=:.1f}")
    return True


def be_rank(rank, part, world_size, devices, backend, folder):
    """One rank of one part of a demonstration."""
    os.chdir(folder)  # what a rank writes goes away with it
    mine = devices[rank::world_size]  # the first one is number `rank`, as init_device_mesh expects
    if backend == "nccl":
        torch.cuda.set_device(mine[0])
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # some of torch takes a GPU because there is one
        torch.set_num_threads(1)
        # torch 2.5 says this of its own code, to everyone on a CPU
        warnings.filterwarnings("ignore", "DTensor random operators may not have|TypedStorage is deprecated")
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/{part.__name__}",  # no port that another job could have taken
        timeout=timedelta(seconds=60),
        world_size=world_size,
        rank=rank,
        device_id=mine[0] if backend == "nccl" else None,
    )
    try:
        result = part(*mine)
    except Exception:
        try:
            os.mkdir("failed")
        except FileExistsError:  # another rank failed first, and this one because that one is gone:
            signal.pause()  # it does not report, and is ended with the rest
        raise
    if rank == 0:
        Path("result").write_text(result if isinstance(result, str) else f"loss={result:.4f}")
    if backend == "nccl":
        dist.destroy_process_group()
    else:
        # Trap: when it is destroyed, gloo's group of torch 2.5 joins its threads while it holds Python's lock, and one
        # of them may need that lock to free the last tensor it reduced: now and then a job hangs. The end frees all.
        os._exit(0)


# ---- The demonstrations: what a rank does on its device, or on two. They return the last loss, or why they cannot run.


def basic(device):
    model = DistributedDataParallel(net().to(device))  # its backward() averages the gradients over all ranks
    return train_and_check(model, share(samples(device)))


def checkpoint(device):
    model, data = DistributedDataParallel(net().to(device)), share(samples(device))
    optimizer = sgd(model)
    train(model, optimizer, data, steps=STEPS // 2)
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.part")
        os.replace("checkpoint.part", "checkpoint.pt")  # nobody ever sees a half of it
    dist.barrier()  # without it, other ranks would look for the file before it is there

    # Without map_location all ranks would load to the device it was saved from: rank 0's.
    saved = torch.load("checkpoint.pt", map_location=device, weights_only=True)
    resumed = net(seed=1).to(device)
    resumed.load_state_dict(saved["model"])
    assert torch.equal(whole(resumed), whole(model)), f"rank {dist.get_rank()} has not loaded what was saved"
    resumed = DistributedDataParallel(resumed)
    optimizer = sgd(resumed)
    optimizer.load_state_dict(saved["optimizer"])
    loss = train(resumed, optimizer, data, steps=STEPS - STEPS // 2)
    check(whole(resumed))  # as if it had never stopped
    return loss


def model_parallel(first, second):
    class TwoDevices(nn.Module):
        def __init__(self):
            super().__init__()
            self.lower, self.upper = net()[:4].to(first), net()[4:].to(second)

        def forward(self, inputs):
            return self.upper(self.lower(inputs).to(second))

    model = DistributedDataParallel(TwoDevices())  # without device_ids, which would be a single device
    inputs, labels = share(samples(first))
    return train_and_check(model, (inputs, labels.to(second)))


def fsdp(device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    try:
        fully_shard(nn.Linear(1, 1, device=device), mesh=mesh)(torch.ones(1, 1, device=device)).sum().backward()
    except (RuntimeError, AttributeError) as error:
        # what torch 2.5 says, and 2.6, and one whose gloo has no average; anything else is a fault
        if not any(said in str(error) for said in ("requires CUDA", "'Stream' object has no attribute", "with Gloo")):
            raise
        return f"fully_shard of torch {torch.__version__} on a {device.type} device: {error}"
    model = net().to(device)
    for layer in (*model[::2], model):  # each Linear is gathered for itself, when it is used
        fully_shard(layer, mesh=mesh)
    return train_and_check(model, share(samples(device)))


def reshard_save(device):
    model = tensor_parallel_net(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = train(model, optimizer, samples(device))
    dcp.save(state(model, optimizer), checkpoint_id="sharded")  # every rank writes its shards
    expected = state(model, optimizer, full_state_dict=True)
    if dist.get_rank() == 0:
        torch.save(expected, "whole.pt")
    return loss


def reshard_load(device, *_):
    model = tensor_parallel_net(device, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = state(model, optimizer)
    dcp.load(loaded, checkpoint_id="sharded")  # in place: every rank reads what its own, larger shards need
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    found, saved = state(model, optimizer, full_state_dict=True), torch.load("whole.pt", device, weights_only=True)
    assert found["optimizer"].pop("param_groups") == saved["optimizer"].pop("param_groups"), "other options than saved"
    torch.testing.assert_close(found, saved, rtol=0, atol=0, msg=lambda text: f"not loaded as saved: {text}")
    return train(model, optimizer, samples(device))


def tensor_parallel(device):
    return train_and_check(tensor_parallel_net(device), samples(device))  # all samples on every rank


def pipeline(device):
    rank, world_size, micro_batches = dist.get_rank(), dist.get_world_size(), 4
    (inputs, labels), layers = samples(device), net().to(device)
    per_rank = -(-len(layers) // world_size)
    before, mine = layers[: rank * per_rank], layers[rank * per_rank : (rank + 1) * per_rank]
    example = before(inputs.chunk(micro_batches)[0]).detach()  # like what this rank receives
    stage = PipelineStage(mine, rank, world_size, device, input_args=example)
    # Not 1F1B: that of torch 2.5 waits for only the last of a pair of transfers, and hangs with gloo.
    schedule = ScheduleGPipe(stage, micro_batches, lambda *pair: F.mse_loss(*pair) / micro_batches)
    schedule.scale_grads = False  # later torches would divide once more; 2.5 never does
    optimizer = sgd(mine)
    for _ in range(STEPS):
        parts = []  # of the loss: the last rank's stage appends them
        optimizer.zero_grad()
        schedule.step(*([inputs] if rank == 0 else []), target=labels, losses=parts)
        optimizer.step()
    ranks = [None] * world_size
    dist.all_gather_object(ranks, (whole(mine), sum(part.item() for part in parts)))
    weights, losses = zip(*ranks, strict=True)
    check(torch.cat(weights))
    return losses[-1]


# ---- What they share.


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(  # widths that 2, 3 and 4 ranks can share evenly
        nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 12)
    )


def tensor_parallel_net(device, seed=0):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Cut by outputs, then by inputs: only the sums after every second layer are communicated.
    by_outputs, by_inputs = ColwiseParallel(), RowwiseParallel()
    plan = {"0": by_outputs, "2": by_inputs, "4": by_outputs, "6": by_inputs}
    return parallelize_module(net(seed).to(device), mesh, plan)


def samples(device):
    """All inputs and labels, the same on every rank."""
    inputs = torch.randn(96, 12, generator=torch.Generator().manual_seed(1)).to(device)
    return inputs, inputs.roll(1, dims=1)


def share(data):
    return [tensor[dist.get_rank() :: dist.get_world_size()] for tensor in data]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def train(model, optimizer, data, steps=STEPS):
    (inputs, labels), losses = data, []
    for _ in range(steps):
        loss = F.mse_loss(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], f"the loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}"
    return losses[-1]


def train_and_check(model, data):
    loss = train(model, sgd(model), data)
    check(whole(model))
    return loss


def check(weights):
    """Fail unless all ranks have the same weights, and those that one process gets with all layers and samples."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, weights)
    different = [rank for rank, other in enumerate(ranks) if not torch.equal(other, ranks[0])]
    assert not different, f"other weights than rank 0's on ranks {different}"
    alone = net()
    train(alone, sgd(alone), samples("cpu"))
    torch.testing.assert_close(
        weights, whole(alone), rtol=0, atol=TOLERANCE, msg=lambda text: f"other weights than one process gets: {text}"
    )


def whole(model):
    """All weights in one tensor on the CPU."""
    weights = [weight.detach() for weight in model.parameters()]
    weights = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]
    return torch.cat([weight.cpu().flatten() for weight in weights])


def state(model, optimizer, **options):
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": weights, "optimizer": moments}


DEMOS = {  # each: its parts, one after another, with the devices a rank has
    "basic": [(basic, 1)],
    "checkpoint": [(checkpoint, 1)],
    "model_parallel": [(model_parallel, 2)],
    "fsdp": [(fsdp, 1)],
    "reshard": [(reshard_save, 1), (reshard_load, 2)],
    "tensor_parallel": [(tensor_parallel, 1)],
    "pipeline": [(pipeline, 1)],
}

if __name__ == "__main__":
    main()
