#!/bin/sh
# The whole table; goes on where a stopped run was. `rm -r results/rows` to begin again.
set -e
cd "$(dirname "$0")/../.."
PYTHONPATH=. exec "${PYTHON:-python}" experiments/coordination/run.py "$@"
