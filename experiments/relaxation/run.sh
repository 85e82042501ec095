#!/bin/sh
# All plans and estimates; goes on where a stopped run was. `rm -r results/estimates` after a change of the model.
set -e
cd "$(dirname "$0")/../.."
PYTHONPATH=. exec "${PYTHON:-python}" experiments/relaxation/run.py "$@"
