"""Recorded answers of NVIDIA's management library (nvidia-ml-py), since no GPU is here.

GPUS: how many the driver has; DRIVER: its version and that of CUDA, as `nvidia-smi` of a host with such a driver shows.
"""

import os
from types import SimpleNamespace


class NVMLError(Exception):
    pass


def nvmlInit():
    if "GPUS" not in os.environ:
        raise NVMLError("Driver Not Loaded")


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return int(os.environ["GPUS"])


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetUUID(index):
    return f"GPU-5a1b{index:04d}-3c21-11ef-9d00-0242ac120002"


def nvmlDeviceGetName(index):
    return "NVIDIA A10"


def nvmlDeviceGetMemoryInfo(index):
    return SimpleNamespace(total=24146608128)


def nvmlSystemGetDriverVersion():
    return os.environ.get("DRIVER", "535.183.01 12020").split()[0]


def nvmlSystemGetCudaDriverVersion_v2():
    return int(os.environ.get("DRIVER", "535.183.01 12020").split()[1])
