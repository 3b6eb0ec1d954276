"""Where the training thread stands: how many collectives it has called, and since when it has not moved."""

import os
import sys
import threading
import time

WAITS = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")  # where a rank waits for its peers
NOT = ("torch/distributed/rpc/",)  # a worker waits there for as long as it is not needed


class Position:
    """Looked at from another thread, about once a second."""

    def __init__(self):
        self._seen: tuple = ()
        self._since = time.monotonic()

    def now(self) -> dict:
        """sequence: collectives called in the default group; at: the user's line; inside: the torch function that it
        waits in, or ""; still: seconds since any of this has changed."""
        stack, at, inside, waits = [], "", "", False
        frame = sys._current_frames().get(threading.main_thread().ident)
        while frame is not None:
            code = frame.f_code
            stack.append((code, frame.f_lasti))
            if not at:
                path = code.co_filename.replace(os.sep, "/")
                if "/torch/" in path:
                    inside = inside if code.co_name == "wrapper" else code.co_name  # torch logs through wrappers
                    waits = not any(part in path for part in NOT) and (waits or any(part in path for part in WAITS))
                elif "/allranks/allranks/" not in path:
                    at = f"{os.path.basename(path)}:{frame.f_lineno}"
            frame = frame.f_back
        sequence = _sequence()
        if (stack, sequence) != self._seen:
            self._seen, self._since = (stack, sequence), time.monotonic()
        still = time.monotonic() - self._since
        return {"sequence": sequence, "at": at, "inside": inside if waits else "", "still": round(still, 1)}


def _sequence() -> int:
    """How many collectives this rank has called in the default process group; 0 without one."""
    dist = sys.modules.get("torch.distributed")
    try:
        return dist.group.WORLD._get_sequence_number_for_group() if dist and dist.is_initialized() else 0
    except (AttributeError, RuntimeError, ValueError):  # another version of torch, or the group is being destroyed
        return 0
