#!/usr/bin/env bash
# Trains on several GPUs, or on CPU ranks without a GPU; on several machines if started on each of them.
#   bash scripts/dist_train.sh CONFIG GPUS [arguments of tools/train.py]
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 MASTER_PORT=29500 bash scripts/dist_train.sh CONFIG GPUS
# For restarts, elastic jobs and pods of Kubernetes, start tools/train.py with torchrun (docs/launchers.md).
# GPUS: processes on this machine. PYTHON: the interpreter (default: the repository's .venv, then python3).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
if [ $# -lt 2 ] || [[ ! "$2" =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: bash scripts/dist_train.sh CONFIG GPUS [arguments of tools/train.py]" >&2
    echo "error: give a config file and the number of processes on this machine, such as: configs/resnet50.yaml 8" >&2
    exit 2
fi
config="$1" gpus="$2"
shift 2
if [ -z "${PYTHON:-}" ]; then
    if [ -x "$root/.venv/bin/python" ]; then PYTHON="$root/.venv/bin/python"; else PYTHON=python3; fi
fi
MASTER_PORT="${MASTER_PORT:-${PORT:-}}"  # PORT: as mmdetection calls it
exec "$PYTHON" "$root/tools/train.py" "$config" --launcher pytorch --gpus "$gpus" \
    ${NNODES:+--nodes "$NNODES"} ${NODE_RANK:+--node-rank "$NODE_RANK"} \
    ${MASTER_ADDR:+--master-addr "$MASTER_ADDR"} ${MASTER_PORT:+--master-port "$MASTER_PORT"} "$@"
