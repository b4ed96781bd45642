#!/usr/bin/env bash
# The packages of scripts/verl_requirements.txt in build/verl, for a PYTHONPATH of their own:
#
#   folder=$(scripts/verl_environment.sh)
#   PYTHONPATH=$folder python ...
#
# Nothing is installed into the environment itself, and a second call finds the first one's folder.
# Without an index it ends with pip's last line and status 1. PYTHON is the interpreter.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
requirements=$here/scripts/verl_requirements.txt
folder=$here/build/verl

if ! cmp -s "$requirements" "$folder/installed"; then
  arriving=$folder.$$
  trap 'rm -rf "$arriving" "$arriving.log"' EXIT
  mkdir -p "$here/build"
  if ! "${PYTHON:-python}" -m pip install --disable-pip-version-check --quiet --no-deps --no-compile \
    --retries 1 --timeout 20 --target "$arriving" --requirement "$requirements" 2>"$arriving.log"; then
    tail -n 1 "$arriving.log" >&2
    exit 1
  fi
  # verl's wheel brings packages of these names, which would replace this project's.
  rm -rf "$arriving/tests" "$arriving/scripts" "$folder"
  cp "$requirements" "$arriving/installed"
  mv "$arriving" "$folder"
fi
echo "$folder"
