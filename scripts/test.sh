#!/usr/bin/env bash
# Runs the tests:  bash scripts/test.sh [arguments of pytest]
# All of them take about 15 minutes on two cores. `-m long` runs the long versions instead.
# Without arguments as many run at once as there are cores, and then, one by one, those that start ranks themselves.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
bash "$root/scripts/setup.sh" test
# Not the caller's folder: the paths in the arguments are relative to the repository, as pytest prints them.
cd "$root"
if [ "$#" -gt 0 ]; then exec "$root/.venv/bin/python" -m pytest "$@"; fi
code=0
"$root/.venv/bin/python" -m pytest -m "not alone" --numprocesses=auto --maxprocesses=8 --dist=loadfile || code=$?
"$root/.venv/bin/python" -m pytest -m alone || code=$?
exit "$code"
