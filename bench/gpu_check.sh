#!/usr/bin/env bash
# One command for a machine with a card: builds for it, checks every kernel, measures every op, prints one table last.
#
#   bench/gpu_check.sh                  needs nvcc, cmake, ninja, a CUDA build of torch >= 2.11, pytest and pytest-benchmark; no network
#   bench/gpu_check.sh --only check     builds and checks; then, where time is lent in pieces, --only measure
#   bench/gpu_check.sh --dry-run        anywhere: lists every step and every test, fails if an op lacks one
#
# PYTHON names the interpreter (python3). PYTHONPATH is kept: packages brought along may lie there. LIMIT is the time for everything
# in seconds (900). Results are added to bench/results/<card>.csv, the table goes to <card>.txt beside it; where OUT is set, both and the
# log are copied there. A failed step does not stop those after it. Exit status: 0 only if every step passed. More: docs/benchmarks.md.
set -uo pipefail
cd "$(dirname "$0")/.."

dry=false
check=true
measure=true
case "$*" in
  "") ;;
  --dry-run) dry=true ;;
  "--only check") measure=false ;;
  "--only measure") check=false ;;
  *) echo "arguments are '$*'; wanted --dry-run, --only check, --only measure or nothing" >&2; exit 2 ;;
esac
python=${PYTHON:-python3}
limit=${LIMIT:-900}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
folder=build/gpu_check
log=$folder/log.txt
summary=()
status=0

remaining() { echo $((limit - SECONDS)); }

# step NAME SECONDS COMMAND...: runs it within its own time and what is left of all; keeps its output in the log, shows the end.
# Out of time, it is interrupted as by Ctrl-C: pytest-benchmark then still writes what it has measured.
step() {
  local name=$1 most=$2 began=$SECONDS rc=0
  shift 2
  if $dry; then
    printf '%-24s at most %3d s: %s\n' "$name" "$most" "$*"
    return 0
  fi
  printf '\n== %s\n' "$name" | tee -a "$log"
  if (($(remaining) < most)); then most=$(remaining); fi
  if ((most <= 0)); then
    rc=124
  else
    timeout --signal=INT --kill-after=8 "$most" "$@" >"$folder/step.txt" 2>&1 || rc=$?
    cat "$folder/step.txt" >>"$log"
    tail -n "$([[ $rc == 0 ]] && echo 4 || echo 40)" "$folder/step.txt"
  fi
  local said=ok
  if ((rc == 124 || rc == 137)); then said="FAILED: out of time"; elif ((rc)); then said="FAILED: exit status $rc"; fi
  if ((rc)); then status=1; fi
  summary+=("$(printf '%-24s %4d s  %s' "$name" $((SECONDS - began)) "$said")")
  return "$rc"
}

finish() {
  if [[ -n ${OUT:-} ]]; then
    mkdir -p "$OUT"
    cp "$log" "$folder/bench.csv" "bench/results/$card.csv" "bench/results/$card.txt" "$OUT" 2>/dev/null
  fi
  printf '\n== %s s in all\n' "$SECONDS"
  printf '%s\n' "${summary[@]}"
  if [[ -s $folder/table.txt ]]; then printf '\n' && cat "$folder/table.txt"; fi
  exit "$status"
}

if $dry; then
  archs=9.0
  card=card
else
  rm -rf "$folder"
  mkdir -p "$folder"
  if ! found=$(nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader | head -n 1) || [[ $found != *,* ]]; then
    echo "nvidia-smi finds no card; bench/gpu_check.sh --dry-run works without one" >&2
    exit 1
  fi
  archs=${found%%,*}
  card=$(sed 's/[^a-z0-9]\+/-/g' <<<"$(tr '[:upper:]' '[:lower:]' <<<"${found#*, }")")
  for tool in nvcc cmake ninja compute-sanitizer; do
    command -v "$tool" >/dev/null || { echo "$tool is not on PATH" >&2; exit 1; }
  done
  # What the package and the checks import, asked before any time is spent on compiling.
  "$python" - <<'PYTHON' || exit 1
import importlib

missing = []
for name in ("torch", "torchvision", "numpy", "safetensors", "tqdm", "PIL", "setuptools", "pytest", "pytest_benchmark"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(f"{name} ({error})")
if missing:
    raise SystemExit(f"missing Python packages: {', '.join(missing)}. Bring wheels and set PYTHONPATH: docs/benchmarks.md")
import torch

if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no card")
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
PYTHON
fi
export TORCH_CUDA_ARCH_LIST=$archs MOSE_FAST_BACKEND=cuda
half=$(($(nproc) > 3 ? $(nproc) / 2 : 1))

# Both builds at once, half of the cores each.
build_all() {
  MAX_JOBS=$half "$python" -m pip install --no-build-isolation --no-deps --no-index --disable-pip-version-check -e . &
  local module=$!
  MAX_JOBS=$half cmake -S . -B build/card -G Ninja -DMOSE_FAST_MODULE=OFF "-DMOSE_FAST_ARCHS_WANTED=$archs" \
    "-DPython_EXECUTABLE=$("$python" -c 'import sys; print(sys.executable)')" \
    && cmake --build build/card --target kernel_check
  local check=$?
  wait "$module" && return "$check"
}
export -f build_all
export archs python half

step "build" 150 bash -c build_all || finish
step "library for the card" 30 "$python" -W error::RuntimeWarning -c \
  'import mose_fast; info = mose_fast.build_info(); print(info); assert info["backend"] == "cuda", info' || finish
if $check; then
  step "kernel_check" 30 build/card/kernel_check
  for tool in memcheck racecheck initcheck; do
    step "kernel_check, $tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 9 build/card/kernel_check
  done
  step "tests/gpu" 150 "$python" -m pytest tests/gpu --ignore=tests/gpu/test_captured.py -q -rs --maxfail=20 -p no:cacheprovider
  # Whole runs, in a process of their own.
  step "captured steps" 120 "$python" -m pytest tests/gpu/test_captured.py -q -rs --maxfail=5 -p no:cacheprovider
fi
if ! $measure; then finish; fi

# The whole first, where time may run out; one process a file: an error of the card spoils the rest of its process.
measured=()
whole=$(ls bench/bench_step.py bench/bench_run.py 2>/dev/null)
for file in $whole $(grep -l '^def bench_' bench/bench_*.py | grep -v -x -F "${whole:-none}"); do
  stem=$(basename "$file" .py)
  json=$folder/$stem.json
  step "$stem" 120 "$python" -m pytest "$file" -q --devices=cuda --compiled=headline --benchmark-quiet -p no:cacheprovider \
    "--benchmark-json=$json"
  if [[ -s $json ]]; then measured+=("$json"); fi
done
step "choices of the step" 90 "$python" -m bench.compare_step
step "mose-fast bench" 150 "$python" -m mose_fast bench --device cuda --precision bf16 --memory 5000 --csv "$folder/bench.csv"

if $dry; then
  printf '%-24s %s\n\n' "results and table" "bench/results/<card>.csv, bench/results/<card>.txt"
  exec "$python" -m bench.collect
fi
if ((${#measured[@]})) && "$python" -m bench.store "${measured[@]}" >"$folder/table.txt" 2>>"$log"; then
  cp "$folder/table.txt" "bench/results/$card.txt"
else
  echo "no benchmark result could be stored: see $log" >&2
  status=1
fi
finish
