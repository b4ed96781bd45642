#!/usr/bin/env bash
# Check that a release can be made of this checkout. The tag is a person's to make.
#
#   scripts/release.sh --check
#
# Version, changelog and citation agree; the wheel is built, installed without extras in an empty
# environment, and does there what needs no Megatron; the quick start trains from the wheel; the
# pages are built, with all their links. Needs the network for numpy and typer. Three minutes.
set -euo pipefail

if [[ ${1:-} != --check || $# -gt 1 ]]; then
  echo "usage: scripts/release.sh --check" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
prepare_environment

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { printf 'release: %s\n' "$*"; }
fail() {
  printf 'release: %s\n' "$*" >&2
  exit 1
}

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' megatron_ext/__init__.py)
latest=$(sed -n 's/^## \([0-9][0-9.]*\).*/\1/p' CHANGELOG.md | head -n 1)
cited=$(sed -n 's/^version: //p' CITATION.cff)
[[ -n $version ]] || fail "megatron_ext/__init__.py declares no version"
[[ $latest == "$version" ]] || fail "CHANGELOG.md begins with $latest, and the version is $version"
[[ $cited == "$version" ]] || fail "CITATION.cff says $cited, and the version is $version"
if git rev-parse -q --verify "refs/tags/v$version" >/dev/null; then
  fail "v$version is tagged already: raise __version__, and begin a section in CHANGELOG.md"
fi
if [[ -n $(git status --porcelain) ]]; then
  fail "there are changes that no commit has; a release is made of a commit"
fi
step "version $version: not tagged yet, in the changelog and in the citation"

python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" .
wheel=$(echo "$work"/megatron_ext-*.whl)
step "built $(basename "$wheel"), $(($(stat -c %s "$wheel") / 1024)) KiB"

python -m venv "$work/empty"
"$work/empty/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
installed=$("$work/empty/bin/python" -m pip list --disable-pip-version-check --format freeze)
if grep -qiE '^(torch|megatron[-_]core|transformer)' <<<"$installed"; then
  fail "the wheel brings torch or Megatron with it: $installed"
fi
(
  cd "$work"
  empty/bin/megatron-ext simulate zb-v --pp 4 -m 8 >simulated.txt 2>/dev/null
  empty/bin/megatron-ext plan pp=4,m=8 --costs f=10,i=12,w=8,comm=1 >planned.txt 2>/dev/null
  empty/bin/megatron-ext doctor >doctor.txt && fail "doctor finds Megatron in an empty environment"
  grep -q '^megatron-core *not installed' doctor.txt || fail "doctor does not say that Megatron is missing"
)
step "in an empty environment simulate and plan run, and doctor says that Megatron is missing"

# The wheel alone, and not this checkout, which .venv knows.
python -m pip install --quiet --disable-pip-version-check --no-deps --target "$work/wheel" "$wheel"
mkdir "$work/start"
cp -r scripts "$work/start/"
(
  cd "$work/start"
  export PYTHONPATH=$work/wheel
  from=$(python -c 'import megatron_ext; print(megatron_ext.__file__)')
  [[ $from == "$work/wheel/"* ]] || fail "the quick start would run $from, not the wheel"
  ITERS=${ITERS:-10} python scripts/quickstart.py >quickstart.txt 2>&1 ||
    { cat quickstart.txt >&2 && fail "the quick start does not train from the wheel"; }
)
step "the quick start trains from the wheel"

NO_MKDOCS_2_WARNING=1 python -m mkdocs build --quiet --strict --site-dir "$work/site"
step "the pages are built, with $(find "$work/site" -name '*.html' | wc -l) files and no broken link"
step "ready: git tag v$version"
