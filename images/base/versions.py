"""What an image really holds, read from inside: the build compares it with what the labels and tags will say.

python versions.py                      # one JSON object
python versions.py torch=2.5.1 ...      # exit status 1 where one differs
python versions.py --licences           # name, version and licence of every Python package
"""

import json
import platform
import sys
from importlib import metadata


def main(argv):
    if argv == ["--licences"]:
        print("\n".join(sorted(licences(), key=str.lower)))
        return 0
    seen = versions()
    if not argv:
        print(json.dumps(seen))
    wrong = [word for word in argv if seen[word.partition("=")[0]] != word.partition("=")[2]]
    for word in wrong:
        name, _, said = word.partition("=")
        print(
            f"versions.py: the image holds {name} {seen[name]}; expected {said}; correct .env or the lock",
            file=sys.stderr,
        )
    return int(bool(wrong))


def versions():
    import torch
    import torchvision

    cudnn = torch.backends.cudnn.version() or 0
    return {
        "torch": torch.__version__.partition("+")[0],
        "torchvision": torchvision.__version__.partition("+")[0],
        "torch_cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "",
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "",
        "python": platform.python_version(),
    }


def licences():
    for package in metadata.distributions():
        told = package.metadata
        kinds = [line.rpartition(" :: ")[2] for line in told.get_all("Classifier", []) if line.startswith("License")]
        licence = told.get("License-Expression") or ", ".join(kinds) or (told.get("License") or "?").splitlines()[0]
        yield f"{told['Name']} {told['Version']}: {licence}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
