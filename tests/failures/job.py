"""The script of every case: meets, reduces for STEPS steps, ends. PLAIN=1 leaves our line out.

BEFORE is run first of all; FAULT is run in step 3 by the rank FAULT_RANK ("all").
"""

import os
import time
from datetime import timedelta  # noqa: F401  (for FAULT)

import torch
import torch.distributed as dist

exec(os.environ.get("BEFORE", ""))
if "PLAIN" not in os.environ:
    import allranks

    allranks.launch()
if __name__ == "__main__":
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(int(os.environ.get("STEPS", "5"))):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world_size
        if step == 0:
            print(
                f"met rank={rank} world_size={world_size} interface={os.environ.get('GLOO_SOCKET_IFNAME')}", flush=True
            )
        if step == 3 and os.environ.get("FAULT_RANK") in (str(rank), "all"):
            exec(os.environ["FAULT"])
        time.sleep(0.05)
    dist.barrier()
    print(f"done rank={rank} world_size={world_size} threads={torch.get_num_threads()}", flush=True)
    dist.destroy_process_group()
