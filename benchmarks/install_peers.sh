#!/usr/bin/env bash
# Creates an environment with the peers of tools/benchmark.py: timm (with Pillow 12), FFCV, DALI, nvImageCodec.
#   bash benchmarks/install_peers.sh DIR
# PYTHON: the interpreter for it. FFCV is compiled; Debian's packages for that are installed if this runs as root.
# A peer that cannot be installed is reported, and the others are installed anyway.
set -euo pipefail
directory="${1:?usage: bash benchmarks/install_peers.sh DIR}"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libopencv-dev libturbojpeg0-dev pkg-config >/dev/null
fi
"${PYTHON:-python3}" -m venv "$directory"
pip="$directory/bin/pip"
# timm's rand-m9-mstd0.5-inc1 fails with Pillow 13: it posterizes to 0 bits.
"$pip" install -q torch torchvision timm 'pillow<13' numpy numba setuptools wheel pybind11
for peer in "--no-build-isolation ffcv" nvidia-dali-cuda130 nvidia-nvimgcodec-cu13; do
    # shellcheck disable=SC2086
    "$pip" install -q $peer 'pillow<13' || echo "not installed: $peer" >&2
done
"$directory/bin/python" benchmarks/contenders.py versions 2>/dev/null || true
echo "python tools/benchmark.py loader --peer all=$directory/bin/python"
