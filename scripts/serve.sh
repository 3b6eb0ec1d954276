#!/usr/bin/env bash
# serve.sh [SCRIPT [ARGUMENT...]]: run a torchrun script on this node, as its part of whatever job there is.
#
#   serve.sh                       example.py, with a rank per GPU
#   serve.sh train.py --lr 0.1     your script
#
# Sets up torchrun and becomes it. Number of nodes, this node's rank and the master are those of the launcher whose
# variables are there, the ranks per node NPROC_PER_NODE, else one per GPU; without a GPU two, on the CPU.
# `python -m allranks run --dry-run SCRIPT` shows the torchrun command line.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit
fi

# as process 1 neither bash nor a Python that is starting answers SIGTERM: put an init in front where nobody has
if [[ $$ == 1 ]] && command -v tini >/dev/null; then
  exec tini -g -- "$0" "$@"
fi

# in a checkout: its library, and its .venv unless another environment has torchrun
repository=$(realpath "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/..")
if [[ -f $repository/allranks/__init__.py ]]; then
  export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH}
  command -v torchrun >/dev/null || PATH=$repository/.venv/bin:$PATH
fi
if ! command -v torchrun >/dev/null; then
  echo "serve.sh: torchrun is not on PATH; expected an environment with PyTorch; activate yours, or run make demo" >&2
  exit 127
fi

if [[ $# == 0 || $1 == -* ]]; then
  example=example.py
  [[ -f $example ]] || example=$repository/images/pytorch-ddp/example.py
  set -- "$example" "$@"
fi
if [[ ! -e /dev/nvidiactl && ! -e /dev/dxg && -z ${NPROC_PER_NODE:-}${PET_NPROC_PER_NODE:-} ]]; then
  echo "serve.sh: no GPU here: 2 ranks on the CPU (NPROC_PER_NODE sets another number)" >&2
  export NPROC_PER_NODE=2
fi
[[ -w ${TMPDIR:-/tmp} ]] || export TMPDIR=/dev/shm # torchrun does not start without a place for its files
[[ -n ${PET_STANDALONE:-} ]] || unset PET_STANDALONE # Kubeflow sets it empty, and torchrun wants a number

if [[ -n ${PET_RDZV_ENDPOINT:-} ]]; then # an elastic job: torchrun itself reads the rest
  # a store for each round: in a shared one, torch 2.5's agents look for each other under different keys after a restart
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  exec torchrun -m allranks run "$@"
fi
# each rank goes through allranks, too: whole lines of output, and no gloo group that hangs at its end (allranks/mend.py)
command=$(python -m allranks run --dry-run python -m allranks run "$@")
eval "exec $command"
