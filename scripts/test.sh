#!/usr/bin/env bash
# Runs the tests:  bash scripts/test.sh [arguments of pytest]
# Without arguments: all but the nightly tests, about 10 minutes on two cores. `-m nightly`: the nightly tests. Both run
# one process per core, at most eight; other arguments, such as the path of a file or folder, go to pytest as they are.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
bash "$root/scripts/setup.sh" test
cd "$root"  # paths in the arguments are relative to the repository, as pytest prints them
if [ "$*" = "" ] || [ "$*" = "-m nightly" ]; then
    # The tests of a file share its fixtures, so they stay in one process.
    set -- "$@" --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder
fi
exec "$root/.venv/bin/python" -m pytest "$@"
