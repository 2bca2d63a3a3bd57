#!/usr/bin/env bash
# Fetch the published tokens of the quickstart to data/: 100 million of C4, and its validation set.
#   download.sh [option ...]
# Options are those of tools/download_assets.py subset. Text instead of tokens: tools/download_assets.py c4.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python tools/download_assets.py subset 100M --out data "$@"
python tools/download_assets.py subset validation --out data "$@"
