#!/usr/bin/env bash
# Install in the active environment, or else in .venv.   install.sh
# The torch of the environment is kept: of a version outside 2.10 to 2.13, pip reports the conflict and changes nothing.
# PYTHON: another interpreter for .venv, 3.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]; then exec make .venv/ready ${PYTHON:+PYTHON="$PYTHON"}; fi
keep=$(mktemp)
trap 'rm -f "$keep"' EXIT
python -c 'from importlib.metadata import distributions
print(next((f"torch=={found.version}" for found in distributions(name="torch")), ""))' >"$keep"
python -m pip install --requirement requirements.txt --constraint "$keep"
python -m pip install --no-build-isolation --no-deps --editable .
python tools/check_environment.py
