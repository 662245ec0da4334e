#!/usr/bin/env bash
# Runs the tests:  bash scripts/test.sh [arguments of pytest]
# All of them take about 15 minutes on two cores. `-m long` runs the long versions instead.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
bash "$root/scripts/setup.sh" test
# Not the caller's folder: the paths in the arguments are relative to the repository, as pytest prints them.
cd "$root"
exec "$root/.venv/bin/python" -m pytest "$@"
