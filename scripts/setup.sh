#!/usr/bin/env bash
# Creates or repairs .venv in the repository root and installs the package there, editable; does nothing if it is done.
#   bash scripts/setup.sh [test|dev]
# PYTHON: the interpreter for it (3.11 or newer). UV_TORCH_BACKEND=cpu: PyTorch without CUDA, by uv; with pip, set
# PIP_EXTRA_INDEX_URL to PyTorch's index of CPU packages. Once it has succeeded, it needs no network. Exit codes: 2 no
# usable Python, or no uv for UV_TORCH_BACKEND; 5 packages could not be installed.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
venv_python="$venv/bin/python"
stamp="$venv/.installed"  # a line for each installed set of extras, with the digest of its requirements
log="$venv/setup.log"
size="about 6 GB" needed_gb=8
if [ "${UV_TORCH_BACKEND:-}" = cpu ]; then size="less than 2 GB" needed_gb=4; fi

fail() {  # fail CODE LINE...
    local code="$1"
    shift
    printf '%s\n' "$@" >&2
    exit "$code"
}

case "${1:-}" in
    "") extras="[turbo]" ;;
    test | dev) extras="[$1]" ;;
    *) fail 2 "error: unknown extra '$1'" "usage: bash scripts/setup.sh [test|dev]" ;;
esac

recipe() {  # a digest of what an installation depends on: the requirements and the path of the editable package
    { echo "$root"; cat "$root/setup.cfg" "$root/pyproject.toml"; } | cksum | tr -d '[:space:]'
}

is_usable() { "$@" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

has_uv() { uv --version >/dev/null 2>&1; }

is_installed() {  # dev includes test, which includes the others
    [ -f "$stamp" ] && is_usable "$venv_python" || return 1
    local key
    key="$(recipe)"
    case "$extras" in
        "[turbo]") grep -q "^$key" "$stamp" ;;
        "[test]") grep -qxF -e "$key[test]" -e "$key[dev]" "$stamp" ;;
        *) grep -qxF -e "$key$extras" "$stamp" ;;
    esac
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_usable "$PYTHON" || fail 2 "error: PYTHON=$PYTHON does not start or is older than 3.11" \
            "Set PYTHON to a Python of 3.11 or newer, or unset it."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    if has_uv; then
        echo ">=3.11"  # uv downloads one
        return
    fi
    fail 2 "error: no Python of 3.11 or newer was found" \
        "Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or set PYTHON to it."
}

make_venv() {
    local python
    python="$(find_python)"
    if has_uv; then
        uv venv --quiet --clear --seed --python "$python" "$venv" || fail 5 "error: uv could not create $venv"
    elif "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -m venv --clear "$venv" || fail 5 "error: $python could not create $venv"
    else
        fail 2 "error: $python has no venv module" \
            "Install it (Debian, Ubuntu: apt-get install python3-venv), or install uv, and run this again."
    fi
}

install_package() {  # uv ignores pip's files and variables, so pip is tried if uv fails; pip ignores UV_TORCH_BACKEND
    cd "$root"
    if [ -z "${PIP_EXTRA_INDEX_URL:-}" ] && has_uv; then
        uv pip install --python "$venv_python" -e ".$extras" && return
        [ -z "${UV_TORCH_BACKEND:-}" ] || return 1
    fi
    "$venv_python" -m pip --version || "$venv_python" -m ensurepip || return
    "$venv_python" -m pip install --disable-pip-version-check -e ".$extras"
}

reason() { (grep -m 1 -E 'ERROR: |[eE]rror: ' "$log" || tail -n 1 "$log") | sed 's/^ *//' | cut -c 1-300; }

works() { (cd / && "$venv_python" -c 'import imagenet_cls, matplotlib, omegaconf, sklearn, timm, torch, torchvision, tqdm'); }

if is_installed; then
    exit 0
fi
if [ -f "$stamp" ]; then
    echo "Updating $venv: seconds to minutes."
else
    echo "Setting up $venv: PyTorch and other packages, $size, once. This takes one to ten minutes."
fi
free_gb="$(df -Pk "$root" | awk 'NR == 2 { print int($4 / 1048576) }')"
if [ "${free_gb:-$needed_gb}" -lt "$needed_gb" ] && [ ! -x "$venv_python" ]; then
    echo "Only $free_gb GB are free; $needed_gb GB are needed, including the download." >&2
fi
if [ -n "${UV_TORCH_BACKEND:-}" ] && [ -z "${PIP_EXTRA_INDEX_URL:-}" ] && ! has_uv; then
    fail 2 "error: UV_TORCH_BACKEND=$UV_TORCH_BACKEND needs uv, and there is none" \
        "Install uv; or unset it, and set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU packages."
fi
echo "1/3  Creating the environment"
if [ ! -e "$venv" ]; then
    make_venv
elif ! "$venv_python" -c '' >/dev/null 2>&1; then
    echo "$venv is incomplete, or its Python is gone: creating it again."
    make_venv
elif ! is_usable "$venv_python"; then
    fail 2 "error: $venv has a Python older than 3.11" "Remove this folder, or rename it, and run this again."
fi
echo "2/3  Downloading and installing the packages; the output is in $log"
if ! install_package >"$log" 2>&1; then
    fail 5 "error: the packages could not be installed: $(reason)" \
        "Check the network and the free disk space ($free_gb GB), then run this again; it continues where it stopped." \
        "If that does not help, remove $venv first. The whole output is in $log"
fi
echo "3/3  Importing the packages"
if ! works >>"$log" 2>&1; then
    fail 5 "error: the installed packages can't be imported: $(reason)" \
        "Remove $venv, and run this again. torch and torchvision must be from the same index: both for CPUs, or neither."
fi
key="$(recipe)"
{ grep "^$key" "$stamp" 2>/dev/null || true; echo "$key$extras"; } >"$stamp.new"
mv "$stamp.new" "$stamp"
echo "Done: $venv"
