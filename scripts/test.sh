#!/usr/bin/env bash
# The checks that every change must pass: lint, format, types, tests.
#
#   scripts/test.sh [pytest arguments]
#   scripts/test.sh --quick     for work in progress: no searches, one training of each placement
#   scripts/test.sh --nightly K/N  the K-th of N pieces of the night: whole files with every combination
#                                  of settings, without lint and types; results go into
#                                  tests/records/night.txt. Names of files in place of K/N run these
#
# All checks run, the quick ones first, also after one has failed; the exit code is 0 only when
# none has. With arguments pytest runs once, with these and on one core.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
prepare_environment

if [[ ${1:-} == --nightly ]]; then
  exec python -m tests.night "${@:2}"
fi

failed=()
check() {
  printf '== %s\n' "$*"
  python -m "$@" || failed+=("$*")
}

# Tests leave the tree as it was: a file that one wrote at the root was committed with a merge.
tree() { git status --porcelain 2>/dev/null || true; }
tree_before=$(tree)

check ruff check
check ruff format --check

# Beside tests of ranks, which leave a part of two cores idle. What it prints comes last.
beside=()
outputs=$(mktemp -d)
trap 'rm -rf "$outputs"' EXIT
check_beside() {
  python -m "$@" >"$outputs/${#beside[@]}" 2>&1 &
  beside+=("$! $*")
}

if [[ ${1:-} == --quick ]]; then
  check_beside mypy
  against_stock='tests/pipeline/training/test_placements.py::test_resumed_training_is_stock_to_the_last_bit'
  check pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not search' tests/unit \
    "$against_stock"[pp2-{zb-h1,gis,zb-v,hanayo}] # a line, a loop, a V and a wave
elif (($#)); then
  check_beside mypy
  check pytest "$@"
else
  # A file's tests share what they build, and stay together, those first that took longest when they
  # last ran here. One file a core also where tests fork ranks: with two a core, trainings of four
  # files took 144 s on two cores, and not 120.
  files=(-n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder)
  check pytest tests/unit "${files[@]}" --durations 10
  check_beside mypy
  check_beside pytest tests/slurm
  check pytest tests --ignore tests/unit --ignore tests/slurm "${files[@]}" --durations 60
fi
for number in "${!beside[@]}"; do
  read -r process words <<<"${beside[number]}"
  printf '== %s\n' "$words"
  wait "$process" || failed+=("$words")
  cat "$outputs/$number"
done
if [[ $(tree) != "$tree_before" ]]; then
  printf '== the tree before and after the tests\n'
  diff <(printf '%s\n' "$tree_before") <(tree) || true
  failed+=('the tests have changed the tree')
fi
if ((${#failed[@]})); then
  printf '== failed: %s\n' "${failed[@]}"
fi
exit $((${#failed[@]} > 0))
