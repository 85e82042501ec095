#!/bin/sh
# Heuristics and searches on every instance of configs/bench; with --rivals the integer programmes as well. Goes on
# where a stopped run was. `rm -r results` to begin again. Arguments go to run.py.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
"${PYTHON:-python}" -m experiments.quality.run "$@"
