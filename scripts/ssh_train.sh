#!/usr/bin/env bash
# Trains on several machines: runs dist_train.sh on each of them by ssh, in this folder, and waits until all have ended.
#   HOSTS="gpu01 gpu02" bash scripts/ssh_train.sh CONFIG GPUS [arguments of tools/train.py]
# GPUS: processes on each machine. In the environment: HOSTS; MASTER_ADDR (default: the first host) and MASTER_PORT
# (29500); PYTHON, the interpreter (default: the repository's .venv, then python3). All machines must have the repository
# and this folder at the same path, and ssh must not ask for a password. Other variables, such as NCCL_DEBUG, are not
# forwarded: set them on the machines, where shells that are not interactive read them. After Ctrl-C the machines save
# and end. If one fails, the others end, too; the exit code is that of the first one.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
read -r -d '' -a hosts <<<"${HOSTS:-}" || true  # separated by spaces or lines
if [ $# -lt 2 ] || [[ ! "$2" =~ ^[1-9][0-9]*$ ]] || [ ${#hosts[@]} = 0 ]; then
    echo "usage: HOSTS=\"HOST HOST ...\" bash scripts/ssh_train.sh CONFIG GPUS [arguments of tools/train.py]" >&2
    echo "error: give the hosts, a config file and the number of processes on each machine" >&2
    exit 2
fi
master="${MASTER_ADDR:-${hosts[0]}}" port="${MASTER_PORT:-29500}"
# Remote processes get SIGHUP, since their terminals close.
stop() { jobs -p | xargs -r kill 2>/dev/null || true; }
trap stop INT TERM
for number in "${!hosts[@]}"; do
    variables=("NNODES=${#hosts[@]}" "NODE_RANK=$number" "MASTER_ADDR=$master" "MASTER_PORT=$port")
    if [ -n "${PYTHON:-}" ]; then variables+=("PYTHON=$PYTHON"); fi
    printf -v command '%q ' env "${variables[@]}" bash "$root/scripts/dist_train.sh" "$@"
    ssh -tt "${hosts[number]}" "cd $(printf %q "$PWD") && exec $command" </dev/null &
done
code=0
for _ in "${hosts[@]}"; do
    wait -n || { failed=$?; [ "$code" != 0 ] || code=$failed; stop; }
done
wait
exit "$code"
