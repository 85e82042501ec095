#!/bin/sh
# The whole table, 45 rows; goes on where a stopped run was. Arguments go to run.py: `--footprint 1.33 --micro-batches 4`.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
"${PYTHON:-python}" experiments/tmo/run.py "$@"
