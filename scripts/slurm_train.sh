#!/usr/bin/env bash
# Trains as a SLURM job, one task for each GPU, and waits for its end; with BATCH=1 as a batch job, without waiting.
#   GPUS=16 bash scripts/slurm_train.sh PARTITION JOB CONFIG [WORK_DIR] [arguments of tools/train.py]
#   BATCH=1 SBATCH_ARGS=--time=24:00:00 GPUS=16 bash scripts/slurm_train.sh PARTITION JOB CONFIG [arguments]
# A batch job gets SIGUSR2 120 s before its time limit: it saves, is requeued and resumes, until training is complete.
# Its output is appended to slurm-NUMBER.out in the folder where it was submitted.
# In the environment: GPUS, the number of tasks (8); GPUS_PER_NODE, at most this many per machine (8); CPUS_PER_TASK (5);
# SRUN_ARGS and SBATCH_ARGS, further options of srun and of sbatch, such as --signal=USR2@300 if saving takes longer;
# GRES, instead of gpu:GPUS_PER_NODE (empty: none, for ranks on CPUs); PYTHON, the interpreter, the repository's own
# .venv where there is one. All machines must see the repository and the data.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
if [ $# -lt 3 ]; then
    echo "usage: bash scripts/slurm_train.sh PARTITION JOB CONFIG [WORK_DIR] [arguments of tools/train.py]" >&2
    echo "error: give a partition, a name for the job and a config file, such as: main r50 configs/resnet50.yaml" >&2
    exit 2
fi
partition="$1" job="$2" config="$3"
shift 3
if [ $# -gt 0 ] && [[ "$1" != -* && "$1" != *=* ]]; then set -- --work-dir "$@"; fi
gpus="${GPUS:-8}" gpus_per_node="${GPUS_PER_NODE:-8}"
if [[ ! "$gpus" =~ ^[1-9][0-9]*$ ]] || [[ ! "$gpus_per_node" =~ ^[1-9][0-9]*$ ]]; then
    echo "error: GPUS=$gpus, GPUS_PER_NODE=$gpus_per_node: both are numbers, such as GPUS=16 GPUS_PER_NODE=8" >&2
    exit 2
fi
if [[ ! "${BATCH:-0}" =~ ^[01]$ ]]; then
    echo "error: BATCH=$BATCH: 1 for a batch job that is requeued until it is complete, 0 to wait for its end" >&2
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
# A rank that fails ends the others.
train=(--kill-on-bad-exit=1 "$PYTHON" -u "$root/tools/train.py" --launcher slurm "$config" "$@")
# SRUN_ARGS and SBATCH_ARGS hold several arguments, so they are not quoted.
# shellcheck disable=SC2086
if [ "${BATCH:-0}" = 0 ]; then exec srun "${options[@]}" ${SRUN_ARGS:-} "${train[@]}"; fi
# SLURM signals the ranks that srun starts, not the batch script. srun does not inherit --cpus-per-task. After a requeue
# SLURM_RESTART_COUNT is set, and the command resumes its own run as with --resume.
# shellcheck disable=SC2086
exec sbatch "${options[@]}" --signal=USR2@120 --requeue --open-mode=append ${SBATCH_ARGS:-} <<EOF
#!/usr/bin/env bash
exec srun --cpus-per-task="\$SLURM_CPUS_PER_TASK" ${SRUN_ARGS:-} $(printf '%q ' "${train[@]}")
EOF
