#!/bin/sh
# Every model on every instance, 10 s, then 60 s, then 600 s on three of them. Goes on where a stopped run was.
# `rm -r results` to begin again. Arguments go to run.py.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
"${PYTHON:-python}" -m experiments.ilp.run "$@"
