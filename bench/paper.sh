#!/usr/bin/env bash
# Runs the paper's main table on a GPU, and the two tables that share its runs: three seeds, three memory sizes. The
# pages go to docs/paper.
#
#   bench/paper.sh DATA_DIR                    table1-cifar, taskwise and classifier
#   bench/paper.sh DATA_DIR ablation cost ...  tables of `mose-fast list paper`
#
# After an interruption, the same command continues. Runs are bf16. SEEDS (0-2), OUT (runs/paper), PYTHON (python3) and
# METHODS (all; mose leaves the baselines out, whose runs take most of the time) may be set.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${1:?usage: bench/paper.sh DATA_DIR [TABLE ...], with the folder of CIFAR-100}
shift
if (($# == 0)); then set -- table1-cifar taskwise classifier; fi
out=${OUT:-runs/paper}
for table in "$@"; do
  "${PYTHON:-python3}" -m mose_fast paper "$table" --data-dir "$data" --seeds "${SEEDS:-0-2}" \
    --device cuda --precision bf16 --per-gpu 1 --out "$out" ${METHODS:+--methods "$METHODS"}
  stem="$out/$table${METHODS:+-${METHODS//,/-}}"
  cp "$stem.md" "$stem.csv" docs/paper/
done
