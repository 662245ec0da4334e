#!/usr/bin/env bash
# Runs the tests:  bash scripts/test.sh [arguments of pytest]
# All of them take about 15 minutes on two cores. `-m nightly` runs the nightly tests instead.
# Without arguments as many run at once as there are cores, and then, one by one, those marked `alone`.
# REPORTS=FOLDER leaves a JUnit file of each of the two parts there.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
bash "$root/scripts/setup.sh" test
# Not the caller's folder: the paths in the arguments are relative to the repository, as pytest prints them.
cd "$root"
if [ "$#" -gt 0 ]; then exec "$root/.venv/bin/python" -m pytest "$@"; fi
part() {  # part NAME ARGUMENTS...
    local name="$1"
    shift
    if [ -n "${REPORTS:-}" ]; then set -- "$@" --junitxml="$REPORTS/$name.xml"; fi
    "$root/.venv/bin/python" -m pytest "$@" || code=$?
}
code=0
part together -m "not alone" --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder
# By their names: to look through all the others for the mark takes a quarter of a minute.
mapfile -t alone < <(grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests)
part alone -m alone "${alone[@]}"
exit "$code"
