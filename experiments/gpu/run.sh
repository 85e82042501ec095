#!/bin/sh
# All networks by plans on the devices that JAX finds here. On a GPU: `sh experiments/gpu/run.sh --measure --scale 8`.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
"${PYTHON:-python}" experiments/gpu/run.py "$@"
