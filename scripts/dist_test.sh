#!/usr/bin/env bash
# Evaluates a checkpoint on several GPUs, or on CPU ranks without a GPU; every image counts exactly once.
#   bash scripts/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]
#   bash scripts/dist_test.sh RUN GPUS [arguments of tools/test.py]     (a run folder, with its own config)
# CHECKPOINT: a checkpoint folder, a run folder, or a .pth or .safetensors file. GPUS, and NNODES, NODE_RANK, MASTER_ADDR,
# MASTER_PORT and PYTHON in the environment: as in dist_train.sh.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
number='^[1-9][0-9]*$'
if [[ "${3:-}" =~ $number ]]; then
    weights=("$1" "$2") gpus="$3"
    shift 3
elif [ -d "${1:-}" ] && [[ "${2:-}" =~ $number ]]; then
    weights=("$1") gpus="$2"
    shift 2
else
    echo "usage: bash scripts/dist_test.sh CONFIG CHECKPOINT GPUS, or RUN GPUS [arguments of tools/test.py]" >&2
    echo "error: give a config and a checkpoint, or a run folder, and the number of processes on this machine" >&2
    exit 2
fi
if [ -z "${PYTHON:-}" ]; then
    if [ -x "$root/.venv/bin/python" ]; then PYTHON="$root/.venv/bin/python"; else PYTHON=python3; fi
fi
MASTER_PORT="${MASTER_PORT:-${PORT:-}}"  # PORT: as mmdetection calls it
exec "$PYTHON" "$root/tools/test.py" "${weights[@]}" --launcher pytorch --gpus "$gpus" \
    ${NNODES:+--nodes "$NNODES"} ${NODE_RANK:+--node-rank "$NODE_RANK"} \
    ${MASTER_ADDR:+--master-addr "$MASTER_ADDR"} ${MASTER_PORT:+--master-port "$MASTER_PORT"} "$@"
