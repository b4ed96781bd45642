#!/usr/bin/env bash
# The checks that every change must pass: lint, format, types, tests.
#
#   scripts/test.sh [pytest arguments]
#
# All of them run, also after one has failed; the exit code is 0 only when none has.
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
check pytest "$@"
exit $((${#failed[@]} > 0))
