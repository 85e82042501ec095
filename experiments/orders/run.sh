#!/bin/sh
# Every case in every order. Goes on where a stopped run was. Arguments go to run.py.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
"${PYTHON:-python}" -m experiments.orders.run "$@"
