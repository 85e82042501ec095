#!/bin/sh
# Imports every network of the zoo; writes results/table.md. About two minutes of CPU time.
set -e
${PYTHON:-python} experiments/models/table.py experiments/models/results/table.md
