#!/usr/bin/env bash
# From a clean machine to agents that have learned from each other: installs, trains two small agents with HACPO on the
# embedded arithmetic task (CPU, offline), trains them again alone (GSPO, the same number of rollouts), compares.
#
# Usage: bash scripts/quickstart.sh [options] [key=value ...]
#   --resume       continue runs that exist, at their last checkpoint
#   --fresh        move runs that exist aside (NAME.1, ...) and start anew
#   --config FILE  another config (default: configs/quickstart.yaml)
#   --short        a few steps on small sets, for a check that all is well
#   --help         this text
# key=value goes to both runs, for example seed=1 steps=80.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

config=configs/quickstart.yaml
existing=()
overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help)
      sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --resume | --fresh) existing+=("$1") ;;
    --short) overrides+=(steps=12 eval.every=0 eval.sets.0.data.limit=200 eval.sets.1.data.limit=200) ;;
    --config)
      [ $# -ge 2 ] || fail "--config needs a file"
      config="$2"
      shift
      ;;
    *=*) overrides+=("$1") ;;
    *) fail "unknown argument $1; see bash scripts/quickstart.sh --help" ;;
  esac
  shift
done
[ "${#existing[@]}" -le 1 ] || fail "--resume and --fresh exclude each other"

environment ""
hacrl() { "$PYTHON" -m hacrl_jax.cli "$@"; }

resolved="$(hacrl train "$config" "${overrides[@]+"${overrides[@]}"}" --dry-run)" || exit $?
name="$(sed -n 's/^name: //p' <<<"$resolved")"
runs="$(sed -n 's/^runs: //p' <<<"$resolved")"
together="$runs/$name"
alone="$runs/${name}_gspo"

found=""
for folder in "$alone" "$together"; do [ ! -e "$folder" ] || found="$folder"; done
if [ -n "$found" ] && [ "${#existing[@]}" -eq 0 ]; then
  [ -t 0 ] && [ -t 1 ] || fail "$found exists; --resume continues it, --fresh moves it aside and starts anew"
  read -r -p "$found exists: [r]esume it, start [f]resh (it is moved aside), or [q]uit? " answer
  case "$answer" in
    r*) existing=(--resume) ;;
    f*) existing=(--fresh) ;;
    *) exit 0 ;;
  esac
fi

train() { hacrl train "$config" "${overrides[@]+"${overrides[@]}"}" "$@" "${existing[@]+"${existing[@]}"}"; }
echo "1 of 2: agents that learn from each other (HACPO)"
train
echo "2 of 2: the same agents, each alone (GSPO), the same number of rollouts"
train "name=${name}_gspo" objective.cross=none
echo
hacrl report "$together" "$alone"
