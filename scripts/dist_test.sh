#!/usr/bin/env bash
# Evaluates a checkpoint on several GPUs, or on CPU ranks without a GPU; every image counts exactly once.
#   bash scripts/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]
# CHECKPOINT: a checkpoint folder, a run folder, or a .pth or .safetensors file. GPUS, and NNODES, NODE_RANK, MASTER_ADDR,
# MASTER_PORT and PYTHON in the environment: as in dist_train.sh.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
if [ $# -lt 3 ] || [[ ! "$3" =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: bash scripts/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]" >&2
    echo "error: give a config file, a checkpoint and the number of processes on this machine" >&2
    exit 2
fi
config="$1" checkpoint="$2" gpus="$3"
shift 3
for word in "$@"; do
    if [[ "$word" =~ ^--g(p(us?)?)?(=|$) ]]; then
        echo "usage: bash scripts/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]" >&2
        echo "error: the number of processes is given twice, as $gpus and with $word; leave $word out" >&2
        exit 2
    fi
done
if [ -z "${PYTHON:-}" ]; then
    if [ -x "$root/.venv/bin/python" ]; then PYTHON="$root/.venv/bin/python"; else PYTHON=python3; fi
fi
nodes=()
if [ -n "${NNODES:-}" ]; then nodes+=(--nodes "$NNODES"); fi
if [ -n "${NODE_RANK:-}" ]; then nodes+=(--node-rank "$NODE_RANK"); fi
if [ -n "${MASTER_ADDR:-}" ]; then nodes+=(--master-addr "$MASTER_ADDR"); fi
if [ -n "${MASTER_PORT:-}" ]; then nodes+=(--master-port "$MASTER_PORT"); fi
if [ -n "${MAX_RESTARTS:-}" ]; then nodes+=(--max-restarts "$MAX_RESTARTS"); fi
exec "$PYTHON" "$root/tools/test.py" "$config" "$checkpoint" --launcher pytorch --gpus "$gpus" \
    ${nodes[@]+"${nodes[@]}"} "$@"
