#!/usr/bin/env bash
# The tests for GPUs, on a node with two or more, or all that one GPU can show.
# docs/measurements.md says what they need and show.
#
#   [PYTHON=python] [RESULTS=folder] scripts/gpu_tests.sh [pytest arguments]
#   [PYTHON=python] [RESULTS=folder] scripts/gpu_tests.sh --one-gpu [--rehearse] [part ...]
#
# It runs in the environment that you train in, and installs nothing. A test that is skipped fails,
# with its reason: give `-m` or `-k` to leave out what your node cannot run.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
results=${RESULTS:-build/gpu-tests}
mkdir -p "$results"

if [[ ${1:-} == --one-gpu ]]; then
  shift
  exec "$python" -m tests.gpu.one_gpu --results "$results" "$@"
fi

nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv || true
"$python" -m megatron_ext doctor | sed '/^$/,$d' || true # the versions, without the patches
"$python" -c 'from tests.gpu.one_gpu.machine import nccl_version as v; print("NCCL", *v())'

export COLUMNS=200 # or the reasons in the summary are cut off
ran=0 failed=0
run() {
  local name=$1 status=0
  shift
  "$python" -m pytest --no-skips --continue-on-collection-errors -rfEP --durations 0 \
    --junit-xml "$results/$name.xml" "$@" || status=$?
  case $status in
    0) ran=1 ;;
    5) ;; # -k or -m has left none of these
    *) failed=1 ;;
  esac
}
# By themselves: their ranks are forked, which CUDA wants from a process that has not used it.
run one-gpu tests/gpu/test_one_gpu.py "$@"
run offload tests/gpu/test_offload.py "$@"
run gpu tests/gpu --ignore tests/gpu/test_one_gpu.py --ignore tests/gpu/test_offload.py "$@"
exit $((failed || !ran))
