#!/usr/bin/env bash
# Creates an environment with the other libraries of tools/benchmark.py: timm (with Pillow 12), FFCV, DALI, nvImageCodec.
#   bash benchmarks/install_peers.sh DIR
# PYTHON: the interpreter for it. FFCV is compiled; root gets Debian's packages for that by apt-get. A library that can't
# be installed is reported, and the others are installed anyway.
set -euo pipefail
directory="${1:?usage: bash benchmarks/install_peers.sh DIR}"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libopencv-dev libturbojpeg0-dev pkg-config >/dev/null
fi
"${PYTHON:-python3}" -m venv "$directory"
install=("$directory/bin/pip" install --quiet)
# timm's rand-m9-mstd0.5-inc1 fails with Pillow 13: it posterizes to 0 bits.
"${install[@]}" torch torchvision timm 'pillow<13' numpy numba setuptools wheel pybind11
"${install[@]}" --no-build-isolation ffcv 'pillow<13' || echo "FFCV was not installed" >&2
"${install[@]}" nvidia-dali-cuda130 || echo "DALI was not installed" >&2
"${install[@]}" nvidia-nvimgcodec-cu13 || echo "nvImageCodec was not installed" >&2
for module in timm ffcv nvidia.dali nvidia.nvimgcodec; do
    "$directory/bin/python" -c "import $module; print('$module is installed')" || true
done
echo "Use it: python tools/benchmark.py loader --peer all=$directory/bin/python"
