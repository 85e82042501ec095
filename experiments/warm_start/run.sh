#!/bin/sh
# Solve the lessons (goes on where it was stopped), train, evaluate. OUT: folder of the solved lessons, about 5 MB.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
OUT="${OUT:-runs/warm-start}"
LESSONS="${LESSONS:-46}"
"${PYTHON:-python}" -m experiments.warm_start.solve "$LESSONS" --out "$OUT/solved"
"${PYTHON:-python}" -m experiments.warm_start.train "$OUT/solved" --out "$OUT/weights.npz"
"${PYTHON:-python}" -m experiments.warm_start.evaluate "$OUT/weights.npz" --out "$OUT"
