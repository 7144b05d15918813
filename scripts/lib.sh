# shellcheck shell=bash
# Shared by the scripts in this folder. Sourced, never run: the caller sets PROGRAM and `set -euo pipefail` first.
# What people read goes to stderr; stdout is kept for results, so that a script's answer can be captured.

readonly EX_USAGE=64

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly REPO
# Services of systemd, cron and containers may have no HOME.
if [[ -z ${HOME:-} ]]; then
  unset HOME
  HOME=~
  export HOME
fi
CACHE=${VLLM_SUPERVISOR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-supervisor}
# A relative cache would mean another folder after the next cd.
[[ $CACHE == /* ]] || CACHE=$PWD/$CACHE
readonly CACHE

say() { printf '%s: %s\n' "$PROGRAM" "$*" >&2; }

# die MESSAGE…: the message begins "cannot", names the value, and ends with the remedy.
die() {
  say "$*"
  exit 1
}

usage_error() {
  say "$*"
  say "try: scripts/$PROGRAM --help"
  exit "$EX_USAGE"
}

# need_value OPTION "$@": the option's value is the argument after it.
need_value() { (($# >= 3)) || usage_error "cannot read $1: it needs a value"; }

is_root() { ((EUID == 0)); }

# ---- system packages -------------------------------------------------------------------------------------------------

readonly POLICY=/usr/sbin/policy-rc.d

# quietly_installed PACKAGE…: no service that a package brings (Prometheus, HAProxy) is started because of us.
quietly_installed() (
  if [[ ! -e $POLICY ]]; then
    trap 'rm -f "$POLICY"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$POLICY"
    chmod 755 "$POLICY"
  fi
  apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
)

# install_packages WHY PACKAGE…: as root on a Debian system it installs them, otherwise it says what to install.
install_packages() {
  local why=$1
  shift
  if ! is_root || ! command -v apt-get >/dev/null; then
    die "cannot $why: missing on this machine: $*; install it (Debian, Ubuntu: sudo apt-get install $*) and run this again"
  fi
  say "installing from the system's packages: $*"
  local log
  log=$(mktemp)
  if ! quietly_installed "$@" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    rm -f "$log"
    die "cannot $why: apt-get could not install $* (its last lines are above); install it by hand and run this again"
  fi
  rm -f "$log"
}

# ---- Python ----------------------------------------------------------------------------------------------------------

# python_of COMMAND: the real interpreter behind a command (pyenv's shims answer for versions that are not there), or nothing.
python_of() {
  "$1" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null || true
}

python_minor() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

# can_make_venv PYTHON: Debian's Python comes without ensurepip until python3.X-venv is installed.
can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# candidates_for MINOR: every place where a Python of this minor version (3.11) may be.
candidates_for() {
  local path
  command -v "python$1" || true
  for path in "/usr/bin/python$1" "/usr/local/bin/python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    [[ -x $path ]] && printf '%s\n' "$path"
  done
  command -v python3 || true
}

# find_python MINOR…: prints the first interpreter, in the order of the arguments, that can make a virtual environment.
find_python() {
  local minor candidate python
  for minor in "$@"; do
    while read -r candidate; do
      python=$(python_of "$candidate")
      [[ -n $python && $(python_minor "$python") == "$minor" ]] || continue
      if can_make_venv "$python"; then
        printf '%s\n' "$python"
        return 0
      fi
    done < <(candidates_for "$minor")
  done
  return 1
}

# ---- long steps ------------------------------------------------------------------------------------------------------

STEP_PID=""

# stop_step: ends the step that runs now, with everything that it started (a step is a session of its own).
stop_step() {
  [[ -n $STEP_PID ]] || return 0
  kill -TERM -- "-$STEP_PID" 2>/dev/null || true
  local tries
  for ((tries = 0; tries < 50; tries++)); do
    kill -0 -- "-$STEP_PID" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL -- "-$STEP_PID" 2>/dev/null || true
  wait "$STEP_PID" 2>/dev/null || true
  STEP_PID=""
}

# run_step TITLE LOG GROWS COMMAND…: runs it quietly into LOG. Every 15 s it says how long it has run and, when GROWS names
# a folder, how large that has become. On failure it shows the log's end and returns 1.
run_step() {
  local title=$1 log=$2 grows=$3 started=$SECONDS next=15 status=0 size
  shift 3
  say "$title"
  setsid "$@" >>"$log" 2>&1 </dev/null &
  STEP_PID=$!
  while kill -0 "$STEP_PID" 2>/dev/null; do
    sleep 0.2
    ((SECONDS - started >= next)) || continue
    next=$((next + 15))
    size=""
    [[ -z $grows ]] || size=", $(du -sm "$grows" 2>/dev/null | cut -f1) MB on disk so far"
    say "  still at it after $((SECONDS - started)) s$size"
  done
  wait "$STEP_PID" || status=$?
  STEP_PID=""
  if ((status == 0)); then
    say "  done in $((SECONDS - started)) s"
    return 0
  fi
  say "  failed after $((SECONDS - started)) s (exit status $status); the last lines of $log:"
  tail -n 15 "$log" | sed 's/^/    /' >&2
  return 1
}

# free_mb PATH: free megabytes where PATH is or will be.
free_mb() {
  local path=$1
  while [[ ! -e $path ]]; do path=$(dirname "$path"); done
  df -Pm "$path" | awk 'NR == 2 { print $4 }'
}

# ---- this project's own environment ----------------------------------------------------------------------------------

# own_python: the interpreter for the project's own environment, 3.10 or newer, able to make one.
own_python() {
  local python
  if [[ -n ${PYTHON:-} ]]; then
    python=$(python_of "$PYTHON")
    [[ -n $python ]] || die "cannot run PYTHON=$PYTHON: it is no Python interpreter; set PYTHON to one of 3.10 or newer"
    can_make_venv "$python" || install_packages "make a virtual environment with $python" "python$(python_minor "$python")-venv"
    printf '%s\n' "$python"
    return 0
  fi
  # What `python3` means comes first: that is the Python that the person chose for this machine.
  python=$(python_of python3)
  if [[ -n $python ]] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' && can_make_venv "$python"; then
    printf '%s\n' "$python"
    return 0
  fi
  if ! find_python 3.11 3.12 3.13 3.10 3.14; then
    install_packages "make the project's own environment (Python 3.10 or newer)" python3 python3-venv
    find_python 3.11 3.12 3.13 3.10 3.14 || die "cannot find Python 3.10 or newer that can make virtual environments; install one and set PYTHON to it"
  fi
}

# fingerprint LOCK PYTHON: changes when an environment made from them would.
fingerprint() {
  { cat "$REPO/requirements/$1.lock" "$REPO/pyproject.toml"; "$2" -VV; printf '%s\n' "$1" "$REPO"; } | sha256sum | cut -d' ' -f1
}

# run_own_pip TITLE ARGUMENT…: pip's temporary files lie in the environment, so that an interrupted run leaves none elsewhere.
run_own_pip() {
  local title=$1
  shift
  mkdir -p "$VENV/tmp"
  run_step "$title" "$VENV/install.log" "" env TMPDIR="$VENV/tmp" \
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "$@" ||
    die "cannot make the project's environment $VENV: pip failed (whole log: $VENV/install.log); check the network and run this again"
}

# own_venv runtime|dev: makes or keeps the project's own environment, VENV (default $REPO/.venv), with exactly what
# requirements/NAME.lock says, and the project itself (editable). It is made anew only when the lock, the project's
# metadata or the interpreter changed. What dev holds is enough for runtime too. Scripts that run at once take turns: the
# lock is on the repository's folder, so no lock file stays, and pip inherits it, so one that outlives its script is waited for.
own_venv() {
  exec 8<"$REPO"
  if ! flock --nonblock 8; then
    say "another script makes the project's environment; waiting for it"
    flock 8
  fi
  make_own_venv "$1"
  exec 8<&-
}

make_own_venv() {
  local name=$1 python wanted stamp
  VENV=${VENV:-$REPO/.venv}
  stamp=$VENV/.made-from
  [[ -f $REPO/requirements/$name.lock ]] || die "cannot make $VENV: $REPO/requirements/$name.lock is missing; check the repository out whole"
  python=$(own_python) || exit 1 # it has said why
  wanted=$(fingerprint "$name" "$python")
  if [[ -x $VENV/bin/vllm-supervisor ]] && grep -qsx "$wanted" "$stamp" && "$VENV/bin/python" -c '' 2>/dev/null; then
    say "the project's environment $VENV is up to date"
    return 0
  fi
  if [[ -e $VENV && ! -f $VENV/pyvenv.cfg && -n $(ls -A "$VENV") ]]; then
    die "cannot make a virtual environment in $VENV: something else is there; remove it or set VENV to another folder"
  fi
  mkdir -p "$VENV"
  # Whatever happens from here on, the folder is known as an environment and may be made anew.
  : >"$VENV/pyvenv.cfg"
  find "$VENV/" -mindepth 1 -maxdepth 1 ! -name pyvenv.cfg -exec rm -rf {} +
  run_step "making the project's environment $VENV with $python" "$VENV/install.log" "" "$python" -m venv "$VENV" ||
    die "cannot make a virtual environment in $VENV with $python; set PYTHON to another interpreter of 3.10 or newer"
  run_own_pip "installing requirements/$name.lock, with hashes" --require-hashes -r "$REPO/requirements/$name.lock"
  run_own_pip "installing the project itself" --no-deps -e "$REPO"
  rm -rf "$VENV/tmp"
  {
    printf '%s\n' "$wanted"
    [[ $name == runtime ]] || fingerprint runtime "$python"
  } >"$stamp"
}
