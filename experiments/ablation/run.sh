#!/bin/sh
# All variants with equal planning time; goes on where a stopped run was. `rm -r results` to begin again. Arguments go to
# run.py. Needs `pip install cma`.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
"${PYTHON:-python}" -m experiments.ablation.run "$@"
