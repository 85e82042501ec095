#!/bin/sh
# Every case of run.py; goes on where a stopped run was. `rm -r results` after a change of a model.
set -e
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" experiments/poet_scale/run.py "$@"
