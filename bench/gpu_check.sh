#!/usr/bin/env bash
# Checks and measures everything on a machine with a GPU, the most important first. Each result is in OUT as soon as
# there is one.
#
#   bench/gpu_check.sh                      all steps in order, as many as fit into LIMIT; prints the next command
#   bench/gpu_check.sh --only smoke,step    these steps          --after smoke    the steps after this one
#   bench/gpu_check.sh --prebuilt DIR       compiles nothing: DIR has library and kernel_check, by bench/prebuild.sh
#   bench/gpu_check.sh --data DIR           trains on DIR/cifar100.npz; without it, on random images, for the time
#   bench/gpu_check.sh --dry-run            without a GPU: prints the plan of each call and every test. Fails if a call
#                                           exceeds LIMIT, if the steps before the later visit need more than two
#                                           calls, if a prebuilt library does not belong to this tree, or if an op
#                                           has no test
#   bench/gpu_check.sh --device cpu         every step at small sizes without a GPU, which only shows that the steps run
#
# PYTHON is the interpreter (python3). PYTHONPATH is kept, for packages brought along. LIMIT is the time for this call
# in seconds (540); a step starts only if its expected time is left. OUT is the folder for results (build/gpu_check), at
# most eight files. After a failed step the others still run. Exit status: 0 only if every step has passed and none is
# left. More: docs/benchmarks.md.
set -uo pipefail

dry=false only="" after="" prebuilt="" data="" device=cuda
again=() # options that the call for the steps left has as well
while (($#)); do
  case $1 in
    --dry-run) dry=true ;;
    --only | --after | --prebuilt | --data | --device)
      (($# > 1)) || { echo "$1 needs a value" >&2; exit 2; }
      value=$2
      case $1 in --prebuilt | --data) value=$(realpath -m "$2") ;; esac
      printf -v "${1#--}" %s "$value"
      case $1 in --only | --after) ;; *) again+=("$1" "$value") ;; esac
      shift ;;
    *) echo "argument is '$1'; wanted --dry-run, --only, --after, --prebuilt, --data or --device" >&2; exit 2 ;;
  esac
  shift
done
[[ $device == cuda || $device == cpu ]] || { echo "--device is '$device'; wanted cuda or cpu" >&2; exit 2; }
[[ -z $only || -z $after ]] || { echo "--only and --after are both given; wanted one" >&2; exit 2; }

out=${OUT:+$(realpath -m "$OUT")}
cd "$(dirname "$0")/.."
work=$PWD/build/gpu_check
out=${out:-$work}
python=${PYTHON:-python3}
limit=${LIMIT:-540}
log=$out/log.txt
cores=$(getconf _NPROCESSORS_ONLN) # nproc would heed OMP_NUM_THREADS
# Without this, a process that uses the profiler twice finds nothing the second time.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TEARDOWN_CUPTI=0
export python device out work data cores

# ---- the steps: `step NAME EXPECTED MOST COMMAND...`, seconds on one Hopper GPU with 16 cores; EXPECTED are
# ---- estimates as long as docs/benchmarks.md says that no step has run on a GPU.

steps() {
  if [[ -n $prebuilt ]]; then checker=$prebuilt/kernel_check; else checker=build/gpu/kernel_check; fi
  [[ -n $prebuilt ]] || step build 110 240 bash -c build_all
  step library 8 40 bash -c check_library
  step self_check 10 40 "$python" -m mose_fast doctor --check
  step tests 80 180 "$python" -m pytest tests/gpu --ignore=tests/gpu/test_captured.py -v -rs --maxfail=40 \
    -p no:cacheprovider -n "$processes" --dist loadfile
  step processes 90 180 "$python" -m bench.processes --device "$device"
  step retries 80 160 "$python" -m bench.processes --device "$device" --retries "$retries"
  step captured 50 150 "$python" -m pytest tests/gpu/test_captured.py -v -rs --maxfail=5 -p no:cacheprovider
  step conflicts 40 120 ncu --kernel-name regex:align_conv --metrics "$conflicts" "$checker"
  step kernel_check 15 60 "$checker"
  step smoke 45 90 "$python" -m bench.smoke --device "$device"
  step step 30 90 "${bench[@]}" bench/bench_step.py -k "$dtype"
  step kernel_times 30 90 "$python" -m bench.kernel_times --device "$device" --csv "$out/kernels.csv"
  step run 60 150 bash -c whole_run
  step loop 45 120 "${bench[@]}" bench/bench_run.py -k "bench_loop and $dtype"
  step norms 40 100 "${bench[@]}" bench/bench_batch_norm_act.py -k "384 and native and $dtype"
  step alignment 30 100 "${bench[@]}" bench/bench_align_conv.py -k "384 and native and $dtype"
  step memcheck 45 120 compute-sanitizer --tool memcheck --error-exitcode 9 "$checker"
  step search 40 90 "${bench[@]}" bench/bench_step.py -k "$dtype and native and whole" --cudnn-search=3
  step search_all 50 110 "${bench[@]}" bench/bench_step.py -k "$dtype and native and whole" --cudnn-search=0
  later
  local file name
  for file in bench/bench_*.py; do
    name=$(basename "$file" .py)
    if grep -q '^def bench_' "$file"; then
      step "$name" "${seconds[$name]:-40}" 150 "${bench[@]}" "$file" -k "not ($done_before)"
    fi
  done
  step bench 100 200 "$python" -m mose_fast bench --device "$device" "${small[@]}" --memory "$memory" \
    --precision "$precision" --csv "$out/bench.csv" --traceback
  step compiled 150 300 "$python" -m pytest bench -q "--devices=$device" --compiled=headline -k compiled \
    --benchmark-quiet -p no:cacheprovider "--rows=$out"
  step racecheck 60 150 compute-sanitizer --tool racecheck --error-exitcode 9 "$checker"
  step initcheck 60 150 compute-sanitizer --tool initcheck --error-exitcode 9 "$checker"
}

# bench/conftest.py writes each row to OUT when it is measured.
bench=("$python" -m pytest -q "--devices=$device" --compiled=off --benchmark-quiet -p no:cacheprovider "--rows=$out")
if [[ $device == cuda ]]; then
  dtype=bfloat16 precision=bf16 memory=5000 small=() retries=20
  # One process for each file: an illegal memory access breaks the rest of its process.
  processes=$(find tests/gpu -name 'test_*.py' | wc -l)
else
  dtype=float32 precision=fp32 memory=200 small=(--width 2) retries=2
  processes=$cores
fi
# Shared memory: accesses that had to wait for others of their warp, and all accesses.
conflicts=l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum
conflicts+=,l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum
conflicts+=,l1tex__data_pipe_lsu_wavefronts_mem_shared.sum
# The benchmarks that earlier steps have measured, as an expression for pytest -k.
done_before="$dtype and (bench_step or bench_loop or 384 and native and (bench_batch_norm_act or bench_align_conv))"
[[ -n $data ]] || done_before+=" or bench_run and not bench_loop"
declare -A seconds=(
  [bench_adam]=18 [bench_align_conv]=60 [bench_augment]=25 [bench_augment_parameters]=15 [bench_batch_norm_act]=85
  [bench_batch_norm_pool]=20
  [bench_expert_losses]=45 [bench_norm_pool]=50 [bench_null]=15 [bench_reservoir]=15 [bench_run]=90 [bench_step]=30
)

# Two builds at the same time, each with half of the cores.
build_all() {
  export MAX_JOBS=$((cores > 3 ? cores / 2 : 1)) MOSE_FAST_BACKEND=cuda TORCH_CUDA_ARCH_LIST=$archs
  "$python" -m pip install --no-build-isolation --no-deps --no-index --disable-pip-version-check -e . &
  local module=$!
  cmake -S . -B build/gpu -G Ninja -DMOSE_FAST_MODULE=OFF "-DMOSE_FAST_ARCHS_WANTED=$archs" \
    "-DPython_EXECUTABLE=$("$python" -c 'import sys; print(sys.executable)')" \
    && cmake --build build/gpu --target kernel_check
  local check=$?
  wait "$module" && return "$check"
}

check_library() {
  "$python" -W error::RuntimeWarning - "$device" <<'PYTHON'
import sys

import torch

import mose_fast

info = mose_fast.build_info()
print(info)
if sys.argv[1] == "cuda":
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU")
    print(torch.cuda.get_device_name())
    if info["backend"] != "cuda":
        raise SystemExit(f"the library's back end is {info['backend']}; wanted cuda")
PYTHON
}

# Split CIFAR-100 as a user runs it; without --data the benchmarks' whole run, on random images.
whole_run() {
  if [[ -z $data ]]; then
    "$python" -m pytest bench/bench_run.py -q "--devices=$device" -k "not bench_loop" --benchmark-quiet \
      -p no:cacheprovider "--rows=$out"
    return
  fi
  local precision=bf16 memory=5000 small=() rc
  if [[ $device == cpu ]]; then precision=fp32 memory=100 small=(--width 2); fi
  "$python" -m mose_fast run --stream split-cifar100 --data-dir "$data" --memory "$memory" --seed 0 --device "$device" \
    "${small[@]}" --precision "$precision" --out "$work/run" --overwrite
  rc=$?
  cp "$work/run/results.json" "$out/run.json"
  cp "$work/run/accuracy.csv" "$out/run.csv"
  return "$rc"
}
export -f build_all check_library whole_run

# ---- modes of a step: its name is collected (names), it is planned (plan), or it runs (run)

names=() mode=names

selected() {
  case $1 in library) return 0 ;; esac # nothing counts that another library did
  if [[ -n $only ]]; then [[ ,$only, == *,$1,* ]]; return; fi
  [[ -z $after ]] || $beyond
}

step() {
  local name=$1
  if [[ $mode == names ]]; then names+=("$name"); return; fi
  if selected "$name"; then "$mode" "$@"; fi
  if [[ $name == "$after" ]]; then beyond=true; fi
}

later() { if [[ $mode == plan ]]; then planned_first=$call; printf '  -- a later visit from here on\n'; fi; }

call=0 sum=0 total=0 planned_first=0 unfit=()

# plan NAME EXPECTED MOST COMMAND...: assigns the step to a call in which it fits, and prints it.
plan() {
  local name=$1 expected=$2 most=$3
  shift 3
  if ((expected > limit)); then unfit+=("$name takes $expected s, of $limit s"); fi
  if ((call == 0 || sum + expected > limit)); then
    if ((call)); then printf '  %-22s %4d s of %d\n' "sum" "$sum" "$limit"; fi
    call=$((call + 1)) sum=0
    printf 'call %d%s\n' "$call" "$([[ $call == 1 ]] || echo ": --after $planned_last")"
    if ((call > 1)); then sum=8; fi # the library is looked at in every call
  fi
  printf '  %-22s %4d s, at most %3d: %s\n' "$name" "$expected" "$most" "$*"
  sum=$((sum + expected)) total=$((total + expected)) planned_last=$name
}

summary=() left=() status=0 last=$after child=""

remaining() { echo $((limit - SECONDS)); }

note() {
  summary+=("$*")
  echo "$*" >>"$out/summary.txt"
}

# run NAME EXPECTED MOST COMMAND...: runs the step, within its own time and that left in the call. The output goes to
# the log, its end to the screen. When the time is over, the step is interrupted as by Ctrl-C, and killed 8 s later.
run() {
  local name=$1 expected=$2 most=$3 began=$SECONDS rc=0 from said=ok
  shift 3
  if [[ $device == cpu ]]; then expected=1; fi
  if ((${#left[@]})) || (($(remaining) < expected)); then left+=("$name"); return; fi
  if (($(remaining) < most)); then most=$(remaining); fi
  if [[ $name != library || -z $after ]]; then last=$name; fi
  printf '\n== %s\n' "$name" | tee -a "$log"
  from=$(wc -c <"$log")
  timeout --signal=INT --kill-after=8 "$most" "$@" >>"$log" 2>&1 &
  child=$!
  wait "$child" || rc=$?
  child=""
  tail -c "+$((from + 1))" "$log" | tail -n "$([[ $rc == 0 ]] && echo 4 || echo 40)"
  if ((rc == 124 || rc == 137)); then said="FAILED: out of time"; elif ((rc)); then said="FAILED: exit status $rc"; fi
  if ((rc)); then status=1; fi
  note "$(printf '%-24s %4d s  %s' "$name" $((SECONDS - began)) "$said")"
  if ((rc)) && [[ $name == build || $name == library ]]; then finish; fi
}

finish() {
  local rows
  trap - INT TERM
  if [[ -n $child ]]; then
    kill -INT "$child" 2>/dev/null
    note "$(printf '%-24s %s' "$last" "FAILED: interrupted")"
    status=1
  fi
  rows=$out/$processor.csv
  if [[ -s $rows ]]; then "$python" -m bench.store --show "$rows" >"$out/$processor.txt" 2>>"$log" || status=1; fi
  if ((${#left[@]})); then
    status=1
    note "not run for lack of time: ${left[*]}"
    if [[ -n $last && -z $only ]]; then note "next: bench/gpu_check.sh --after $last ${again[*]}"; fi
  fi
  printf '\n== %s s in all; results in %s\n' "$SECONDS" "$out"
  printf '%s\n' "${summary[@]}"
  if [[ -s $rows ]]; then
    printf '\n' && cat "$out/$processor.txt"
    printf 'to keep these rows: python -m bench.store %s\n' "$rows"
  fi
  exit "$status"
}

beyond=false
steps
for name in ${only//,/ } $after; do
  [[ " ${names[*]} " == *" $name "* ]] || { echo "there is no step '$name'; wanted one of ${names[*]}" >&2; exit 2; }
done

if $dry; then
  archs=9.0 mode=plan
  steps
  if ((call)); then printf '  %-22s %4d s of %d\n%d s in all\n' "sum" "$sum" "$limit" "$total"; fi
  if ((call > 1)) && [[ -n $only ]]; then unfit+=("--only needs $call calls"); fi
  if ((planned_first > 2)); then unfit+=("the steps before the later visit need $planned_first calls, of two"); fi
  if [[ -n $prebuilt ]] && ! "$python" -m bench.prebuilt "$prebuilt"; then
    unfit+=("$prebuilt does not serve this tree")
  fi
  for complaint in "${unfit[@]}"; do echo "does not fit: $complaint" >&2; done
  printf '\n'
  "$python" -m bench.collect || exit
  ((${#unfit[@]} == 0))
  exit
fi

mkdir -p "$out" "$work"
if ! found=$(nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader | head -n 1) || [[ $found != *,* ]]; then
  echo "nvidia-smi finds no GPU; bench/gpu_check.sh --dry-run works without one" >&2
  exit 1
fi
export archs=${found%%,*}
processor=$(sed 's/[^a-z0-9]\+/-/g' <<<"$(tr '[:upper:]' '[:lower:]' <<<"${found#*, }")")
if [[ $device == cpu ]]; then processor=cpu; fi
if [[ -n $prebuilt ]]; then
  "$python" -m bench.prebuilt "$prebuilt" || exit 1
  export MOSE_FAST_NATIVE=$prebuilt
elif [[ -z $only$after || ,$only, == *,build,* ]]; then
  for tool in nvcc cmake ninja; do
    command -v "$tool" >/dev/null || { echo "$tool is not on PATH" >&2; exit 1; }
  done
fi
# Checks the imports of the package and of the tests before any time is spent on compiling.
"$python" - <<'PYTHON' || exit 1
import importlib.util

wanted = ("torch", "torchvision", "numpy", "safetensors", "tqdm", "psutil", "PIL", "setuptools", "pytest")
wanted += ("pytest_benchmark", "xdist")
missing = [name for name in wanted if importlib.util.find_spec(name) is None]
if missing:
    found = ", ".join(missing)
    raise SystemExit(f"missing Python packages: {found}. Bring wheels and set PYTHONPATH: docs/benchmarks.md")
PYTHON
trap finish INT TERM
note "$(date -u +%FT%TZ) ${found#*, }, $cores cores, LIMIT $limit"
mode=run
steps
finish
