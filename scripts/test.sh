#!/usr/bin/env bash
# Installs the test extra and runs the suite: what is not marked slow, or with --all everything.
# Usage: bash scripts/test.sh [--all] [any arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

case "${1:-}" in
  -h | --help)
    sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
selection=(-m "not slow")
rest=()
for argument in "$@"; do
  if [ "$argument" = "--all" ]; then selection=(); else rest+=("$argument"); fi
done

environment test
cores="$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
workers=$((cores < 8 ? cores : 8)) # each holds JAX with eight fake devices
exec "$PYTHON" -m pytest -n "$workers" --dist worksteal "${selection[@]+"${selection[@]}"}" "${rest[@]+"${rest[@]}"}"
