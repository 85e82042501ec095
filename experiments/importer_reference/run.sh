#!/bin/sh
# Compile the reference steps; needs the virtual environment of README.md as $PYTHON. About three minutes on two cores.
set -e
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
OUT=experiments/importer_reference/results
mkdir -p "$OUT"
compile() {
  name=$1
  shift
  PYTHONPATH=. "$PYTHON" experiments/importer_reference/compile_reference.py "$@" >"$OUT/$name.json"
}
compile gpt2-a100 --model gpt2 --target a100
compile gpt2-xl-h100 --model gpt2-xl --target h100
# Variations that the importer's rules were not fitted to.
compile gpt2-h100 --model gpt2 --target h100
compile gpt2-medium-a100 --model gpt2-medium --target a100
compile gpt2-b2-t2048-a100 --model gpt2 --target a100 -o batch=2 -o sequence=2048
compile gpt2-fp32-a100 --model gpt2 --target a100 -o dtype=float32
compile gpt2-wide-h100 --model gpt2 --target h100 -o layers=4 -o width=4096 -o heads=32 -o sequence=512
compile llama-7b-4-layers-a100 --model llama-7b --target a100 -o layers=4 -o batch=2
compile llama-7b-4-layers-h100 --model llama-7b --target h100 -o layers=4 -o batch=2
compile mlp-a100 --model mlp --target a100 -o layers=16 -o width=4096 -o batch=16384
