# shellcheck shell=bash
# The Python environment of this checkout. Source this file, then call:
#
#   prepare_environment   makes or updates .venv, and puts it first on PATH
#   find_python           sets FOUND_PYTHON to an interpreter that can make it
#
# PYTHON=/path/to/python is tried before all others. Nothing outside .venv is changed, except that
# `uv`, where there is one and no Python fits, is asked to fetch a Python of its own.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$REPOSITORY/.venv

say() { printf 'environment: %s\n' "$*" >&2; }

# What a candidate must be able to do. It answers with its version and the interpreter that it
# really is, which is neither a pyenv shim nor the venv that is about to be remade.
PROBE='
import sys
print("%d.%d.%d" % sys.version_info[:3], flush=True)
if sys.version_info < (3, 12):
    sys.exit("is Python %d.%d.%d" % sys.version_info[:3])
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("is Python %d.%d.%d without %s" % (*sys.version_info[:3], error.name))
print(getattr(sys, "_base_executable", None) or sys.executable)
'

# Runs candidate $1: a pyenv shim exists and is executable, and fails all the same.
try_python() {
  local candidate=$1 answer
  if ! type -P -- "$candidate" >/dev/null; then
    TRIED+=("$candidate: not there")
    return 1
  fi
  if answer=$("$candidate" -c "$PROBE" 2>&1); then
    FOUND_PYTHON=${answer##*$'\n'}
    say "found Python ${answer%%$'\n'*}: $FOUND_PYTHON"
    return 0
  fi
  answer=${answer##*$'\n'}
  [[ $answer == is\ Python* ]] || answer="does not run: $answer"
  TRIED+=("$candidate: $answer")
  return 1
}

find_python() {
  local candidate pyenv_root
  TRIED=()
  FOUND_PYTHON=
  if [[ -n ${PYTHON:-} ]]; then
    try_python "$PYTHON" && return 0
    say "PYTHON=${TRIED[0]}; trying others"
  fi
  for candidate in python3.12 python3.13 python3; do
    try_python "$candidate" && return 0
  done

  pyenv_root=$(pyenv root 2>/dev/null) || pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}
  for candidate in "$pyenv_root"/versions/3.*/bin/python; do
    # Without a match the pattern itself is left.
    [[ -x $candidate ]] && try_python "$candidate" && return 0
  done

  if type -P uv >/dev/null; then
    if ! candidate=$(uv python find '>=3.12' 2>/dev/null); then
      say 'no Python fits here; uv fetches Python 3.12'
      uv python install 3.12 >&2 || TRIED+=('uv python install 3.12: failed')
      candidate=$(uv python find '>=3.12' 2>/dev/null) || candidate=
    fi
    [[ -n $candidate ]] && try_python "$candidate" && return 0
  else
    TRIED+=('uv: not there')
  fi

  say 'no Python >= 3.12 with venv and ensurepip was found. Tried:'
  printf '  %s\n' "${TRIED[@]}" >&2
  say 'install one (apt install python3.12 python3.12-venv, pyenv install 3.12, or'
  say 'uv python install 3.12), or name yours: PYTHON=/path/to/python3.12'
  return 1
}

# What the environment was made for: this folder and these requirements.
wanted_stamp() {
  printf '%s\n' "$REPOSITORY"
  cat "$REPOSITORY"/{setup.py,pyproject.toml,constraints.txt,scripts/environment.sh}
}

is_prepared() {
  [[ -x $VENV/bin/python ]] && wanted_stamp | cmp -s - "$VENV/installed"
}

# Passes on the lines of pip's log that mean waiting: downloads of ten MB and more, unpacking.
show_progress() {
  awk '/^ *Downloading .*\([0-9.]+ MB\)/ {
         size = substr($(NF - 1), 2) + 0
         if (size >= 10) { sub(".*/", "", $2); split($2, part, "-")
           printf "environment:   %s %s (%d MB)\n", part[1], part[2], size; fflush() } }
       /^Installing collected packages/ { print "environment:   unpacking"; fflush() }'
}

# Why the existing .venv cannot be updated in place; fails when it can.
reason_to_remake() {
  if [[ ! -e $VENV ]]; then
    echo 'there is no .venv yet'
  elif [[ -e $VENV/installing ]]; then
    echo 'the last installation was interrupted'
  elif [[ -f $VENV/installed && $(head -n 1 "$VENV/installed") != "$REPOSITORY" ]]; then
    echo 'this folder was moved or copied'
  elif ! "$VENV/bin/python" -c "$PROBE" >/dev/null 2>&1; then
    echo '.venv has no working Python >= 3.12'
  elif ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    echo '.venv has no working pip'
  else
    return 1
  fi
}

install() {
  local reason log=$VENV/install.log
  if reason=$(reason_to_remake); then
    find_python || return 1
    say "making .venv ($reason)"
    "$FOUND_PYTHON" -m venv --clear "$VENV" || return 1
  fi

  rm -f "$VENV/installed"
  : >"$VENV/installing"
  say 'installing megatron_ext[megatron,plot,certify,search,docs,dev] into .venv'
  say '(the first time this fetches torch and Megatron: minutes, several GB; log: .venv/install.log)'
  # pip would compile each file of torch and the rest, most of a minute: what is imported is
  # compiled then, once.
  if ! (
    set -o pipefail
    "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile \
      --constraint "$REPOSITORY/constraints.txt" --editable "${REPOSITORY}[megatron,plot,certify,search,docs,dev]" 2>&1 | tee "$log" | show_progress >&2
  ); then
    # pip itself gave up, so nothing was left half done.
    rm -f "$VENV/installing"
    say 'pip failed; the end of .venv/install.log:'
    tail -n 20 "$log" >&2
    return 1
  fi
  wanted_stamp >"$VENV/installing" && mv "$VENV/installing" "$VENV/installed" || return 1
  say 'done'
}

# Only one process installs; the others wait for it and then find its work.
install_alone() {
  if type -P flock >/dev/null && ! flock --nonblock 9; then
    say 'another process is installing; waiting for it'
    flock 9
  fi
  is_prepared || install 9>&-
}

prepare_environment() {
  if ! is_prepared; then
    # The lock is on a file that is always there, so that none is left behind.
    install_alone 9<"$REPOSITORY/setup.py" || return 1
  fi
  export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH
  # Without compiled files each process would compile torch and Megatron again.
  unset PYTHONHOME PYTHONDONTWRITEBYTECODE
}
