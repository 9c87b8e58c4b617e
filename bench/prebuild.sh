#!/usr/bin/env bash
# Builds the library and kernel_check, stripped, for bench/gpu_check.sh --prebuilt on another machine. This machine
# needs no GPU.
#
#   PYTHON=venv/bin/python bench/prebuild.sh DIR [ARCHS]
#
# PYTHON (python3) must have the other machine's versions of Python and torch (a CUDA build); nvcc, cmake and ninja must
# be on PATH. ARCHS are the other machine's compute capabilities (9.0). DIR gets about 6 MB. The library serves only a
# tree with the same csrc. MAX_JOBS limits the number of compilers that run at the same time.
set -euo pipefail
target=$(realpath -m "${1:?usage: bench/prebuild.sh DIR [ARCHS]}")
cd "$(dirname "$0")/.."
archs=${2:-9.0}
python=$(command -v "${PYTHON:-python3}")
version=$("$python" -c 'import sys, torch; print(f"torch{torch.__version__}-{sys.implementation.cache_tag}")')
build=build/prebuild-$version

cmake -S . -B "$build" -G Ninja -DMOSE_FAST_BACKEND=cuda "-DMOSE_FAST_ARCHS_WANTED=$archs" "-DPython_EXECUTABLE=$python"
cmake --build "$build" --target _C kernel_check
mkdir -p "$target"
rm -f "$target"/_C*.so
cp "$build"/mose_fast/_C*.so "$build/mose_fast/_build.json" "$build/kernel_check" "$target"
strip --strip-unneeded "$target"/_C*.so
strip "$target/kernel_check"
"$python" -m bench.prebuilt "$target" --seal
MOSE_FAST_NATIVE=$target "$python" -W error::RuntimeWarning -c 'import mose_fast; print(mose_fast.build_info())'
du -h "$target"/_C*.so "$target/kernel_check"
