#!/bin/sh
# The quickstart, and with its output and figure the README: rewrites README.md and docs/images/plan.svg.
set -e
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" experiments/quickstart/refresh.py "$@"
