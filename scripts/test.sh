#!/usr/bin/env bash
# The checks that every change must pass: lint, format, types, tests.
#
#   scripts/test.sh [pytest arguments]
#   scripts/test.sh --quick     for work in progress: no searches, one training of each placement
#   scripts/test.sh --nightly   every combination of settings, not each pair once
#
# All of them run, the quick ones first, also after one has failed; the exit code is 0 only when
# none has. With arguments pytest runs once, with these and on one core.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
prepare_environment

failed=()
check() {
  printf '== %s\n' "$*"
  python -m "$@" || failed+=("$*")
}

check ruff check
check ruff format --check

# Types beside tests of ranks, which leave a part of two cores idle.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
check_types_beside() {
  python -m mypy >"$types" 2>&1 &
  types_process=$!
}

if [[ ${1:-} == --nightly ]]; then
  export MEGATRON_EXT_NIGHTLY=1
  shift
fi
if [[ ${1:-} == --quick ]]; then
  check_types_beside
  against_stock='tests/pipeline/test_placements.py::test_resumed_training_is_stock_to_the_last_bit'
  check pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not search' tests/unit \
    "$against_stock"[pp2-{zb-h1,gis,zb-v,hanayo}] # a line, a loop, a V and a wave
elif (($#)); then
  check_types_beside
  check pytest "$@"
else
  # A file's tests share what they build, and stay together. The other folders fork ranks of their
  # own, which wait for one another: two files at once keep two cores busy, the longest first.
  check pytest tests/unit -n auto --maxprocesses 4 \
    --dist loadfile --no-loadscope-reorder --durations 10
  check_types_beside
  check pytest tests --ignore tests/unit --ignore tests/slurm \
    -n 2 --dist loadfile --no-loadscope-reorder --durations 20
  # A cluster of two nodes takes longer than SLURM waits to launch a job beside all that.
  check pytest tests/slurm
fi
printf '== mypy\n'
wait "$types_process" || failed+=(mypy)
cat "$types"
if ((${#failed[@]})); then
  printf '== failed: %s\n' "${failed[@]}"
fi
exit $((${#failed[@]} > 0))
