#!/bin/sh
# Imports every network of the zoo; writes results/table.md. About two minutes.
set -e
${PYTHON:-python} experiments/models/table.py experiments/models/results/table.md
