#!/usr/bin/env bash
# The checks that every change must pass: lint, format, types, tests.
#
#   scripts/test.sh [pytest arguments]
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
check mypy
if ((${#failed[@]})); then
  printf '== the exit code will be 1, because this failed: %s\n' "${failed[@]}"
fi
if (($#)); then
  check pytest "$@"
else
  # A file's tests share what they build, and stay together. The other folders fork ranks of their
  # own, which wait for one another: two files at once keep two cores busy.
  check pytest tests/unit -n auto --maxprocesses 4 --dist loadfile --durations 10
  check pytest tests --ignore tests/unit --ignore tests/slurm -n 2 --dist loadfile --durations 20
  # A cluster of two nodes takes longer than SLURM waits to launch a job beside all that.
  check pytest tests/slurm
fi
exit $((${#failed[@]} > 0))
