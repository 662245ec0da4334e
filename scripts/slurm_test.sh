#!/usr/bin/env bash
# Evaluates a checkpoint as a SLURM job, one task for each GPU, and waits for its end.
#   GPUS=8 bash scripts/slurm_test.sh PARTITION JOB CONFIG CHECKPOINT [arguments of tools/test.py]
# In the environment: GPUS, the number of tasks (8); GPUS_PER_NODE, at most this many per machine (8); CPUS_PER_TASK (5);
# SRUN_ARGS, further options of srun; GRES, instead of gpu:GPUS_PER_NODE (empty: none, for ranks on CPUs); PYTHON, the
# interpreter, the repository's own .venv where there is one. All machines must see the repository and the data.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
if [ $# -lt 4 ]; then
    echo "usage: bash scripts/slurm_test.sh PARTITION JOB CONFIG CHECKPOINT [arguments of tools/test.py]" >&2
    echo "error: give a partition, a name for the job, a config file and a checkpoint or run folder" >&2
    exit 2
fi
partition="$1" job="$2"
shift 2
gpus="${GPUS:-8}" gpus_per_node="${GPUS_PER_NODE:-8}"
if [[ ! "$gpus" =~ ^[1-9][0-9]*$ ]] || [[ ! "$gpus_per_node" =~ ^[1-9][0-9]*$ ]]; then
    echo "error: GPUS=$gpus, GPUS_PER_NODE=$gpus_per_node: both are numbers, such as GPUS=16 GPUS_PER_NODE=8" >&2
    exit 2
fi
if [ "$gpus" -lt "$gpus_per_node" ]; then gpus_per_node="$gpus"; fi
gres="${GRES-gpu:$gpus_per_node}"
if [ -z "${PYTHON:-}" ]; then
    if [ -x "$root/.venv/bin/python" ]; then PYTHON="$root/.venv/bin/python"; else PYTHON=python3; fi
fi
options=(--partition="$partition" --job-name="$job" --ntasks="$gpus" --ntasks-per-node="$gpus_per_node")
options+=(--cpus-per-task="${CPUS_PER_TASK:-5}")
if [ -n "$gres" ]; then options+=(--gres="$gres"); fi
# A rank that fails ends the others. SRUN_ARGS holds several arguments, so it is not quoted.
# shellcheck disable=SC2086
exec srun "${options[@]}" --kill-on-bad-exit=1 ${SRUN_ARGS:-} "$PYTHON" -u "$root/tools/test.py" --launcher slurm "$@"
