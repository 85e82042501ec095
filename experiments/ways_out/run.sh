#!/bin/sh
# Five networks by plans, in every way out that is installed; writes results/ and the table in docs/run-a-plan.md.
set -e
cd "$(dirname "$0")/../.."
PYTHONPATH=. ${PYTHON:-python} experiments/ways_out/run.py "$@"
