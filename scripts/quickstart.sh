#!/usr/bin/env bash
# Train a small GPT on the sources of Python's standard library, on this machine's CPU.
#
#   [NPROC=4] [SCHEDULE=zb-h1] [ITERS=40] scripts/quickstart.sh [Megatron flags]
#
# The first run sets up .venv and prepares the text; later ones start training in seconds.
# SCHEDULE= (empty) trains under Megatron's own schedule.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
prepare_environment
exec python scripts/quickstart.py "$@"
