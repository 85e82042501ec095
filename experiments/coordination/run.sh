#!/bin/sh
# The whole table, then the row in which the gradient helps once more with almost no descent (planner 14 is `gradient`).
# Goes on where a stopped run was. `rm -r results` to begin again. Arguments go to run.py.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
"${PYTHON:-python}" experiments/coordination/run.py "$@"
"${PYTHON:-python}" experiments/coordination/run.py --out experiments/coordination/results/20-steps \
  --case gpt2-all-3-k1-full -o planners.14.steps=20
"${PYTHON:-python}" experiments/coordination/fcfs_drift.py
