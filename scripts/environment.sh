# Sourced by quickstart.sh and test.sh: finds Python, makes or takes an environment, installs the package into it.
# After `environment EXTRA` (EXTRA may be empty) the variable PYTHON is that environment's interpreter.

OLDEST="3.11"
NEEDED_MB=3000  # what an installation takes, pip's own temporary files included

fail() { # message: one line, status 2
  echo "error: $*" >&2
  exit 2
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

free_mb() { df -Pm "$1" 2>/dev/null | awk 'NR == 2 {print $4}'; }

find_python() { # the interpreter that .venv is made from
  if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is Python $(version_of "$PYTHON" || echo '(does not run)'); hacrl_jax needs $OLDEST or newer"
    return
  fi
  local candidate found=""
  for candidate in python3 python python3.13 python3.12 python3.11; do
    if new_enough "$candidate"; then
      PYTHON="$candidate"
      return
    fi
    [ -n "$found" ] || found="$(version_of "$candidate" || true)"
  done
  fail "hacrl_jax needs Python $OLDEST or newer, found ${found:-none}; install one, or set PYTHON=/path/to/python3.11"
}

make_venv() { # .venv in the repository, made anew where an interrupted call left half of one
  if [ -x .venv/bin/python ] && new_enough .venv/bin/python && .venv/bin/python -c 'import pip' 2>/dev/null; then
    PYTHON="$PWD/.venv/bin/python"
    return
  fi
  find_python
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$PYTHON has no venv module; on Debian or Ubuntu: sudo apt install python$(version_of "$PYTHON")-venv"
  enough_space .
  echo "making .venv with Python $(version_of "$PYTHON")"
  local said
  said="$("$PYTHON" -m venv --clear .venv 2>&1)" || fail "cannot make .venv: $(reason "$said")"
  PYTHON="$PWD/.venv/bin/python"
}

enough_space() { # folder
  local free
  free="$(free_mb "$1")"
  [ -z "$free" ] || [ "$free" -ge "$NEEDED_MB" ] ||
    fail "the disk is full: $(cd "$1" && pwd) has $free MB free, an installation needs $NEEDED_MB MB"
}

reason() { # the line of a log that says why
  local line
  line="$(grep -m 1 -i 'no space left' <<<"$1" || true)"
  [ -z "$line" ] || { echo "the disk is full ($line)"; return; }
  line="$(grep -i 'error' <<<"$1" | tail -n 1 || true)"
  echo "${line:-$(tail -n 1 <<<"$1")}"
}

install() { # extra: installs into PYTHON's environment, once for each state of pyproject.toml
  local prefix stamp state log target="." pip said
  prefix="$("$PYTHON" -c 'import sys; print(sys.prefix)')"
  [ -z "$1" ] || target=".[$1]"
  stamp="$prefix/.hacrl_jax_installed${1:+_$1}"
  state="$PWD $(cksum <pyproject.toml)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ] && "$PYTHON" -c 'import hacrl_jax' 2>/dev/null; then
    return
  fi
  enough_space "$prefix"
  if "$PYTHON" -m pip --version >/dev/null 2>&1; then
    pip=("$PYTHON" -m pip install --disable-pip-version-check --quiet)
  elif command -v uv >/dev/null; then
    pip=(uv pip install --quiet --python "$PYTHON")
  else
    fail "the environment $prefix has neither pip nor uv; leave it (deactivate) or run: $PYTHON -m ensurepip"
  fi
  log="$(mktemp)" || fail "the disk is full: no temporary file can be made in ${TMPDIR:-/tmp}"
  echo "installing hacrl_jax${1:+ with its $1 extra} into $prefix (some minutes the first time)"
  if ! "${pip[@]}" -e "$target" >"$log" 2>&1; then
    said="$(cat "$log")"
    fail "the installation failed: $(reason "$said") (all of it: $log)"
  fi
  rm -f "$log"
  # With an extra the package itself is installed, too.
  { echo "$state" >"$stamp" && echo "$state" >"${stamp%_"$1"}"; } 2>/dev/null || fail "cannot write $stamp"
}

environment() { # extra
  local active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
  # conda's base is active in every shell without anybody's wish: it does not count.
  [ -n "${VIRTUAL_ENV:-}" ] || [ "${CONDA_DEFAULT_ENV:-}" != base ] || active=""
  if [ -n "$active" ]; then
    PYTHON="$active/bin/python"
    [ -x "$PYTHON" ] || fail "the active environment $active has no bin/python; deactivate it"
    new_enough "$PYTHON" ||
      fail "the active environment $active has Python $(version_of "$PYTHON"); hacrl_jax needs $OLDEST or newer"
  else
    make_venv
  fi
  install "$1"
}
