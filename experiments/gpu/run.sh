#!/bin/sh
# A medium transformer by a plan for little memory, with the runtime and in a jitted step: times and peaks, measured and
# predicted. Needs JAX with a GPU and tmojax's other requirements; without a GPU it runs a small network on the CPU.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
"${PYTHON:-python}" experiments/gpu/run.py "$@"
