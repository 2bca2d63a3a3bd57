#!/usr/bin/env bash
# Install in the active environment, whose torch is kept, or else in .venv.   install.sh
# PYTHON: another interpreter for .venv, 3.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]; then exec make .venv/ready ${PYTHON:+PYTHON="$PYTHON"}; fi
python -m pip install --requirement requirements.txt
python -m pip install --no-build-isolation --no-deps --editable .
python tools/check_environment.py
