#!/usr/bin/env bash
# Fetch the published tokens of the quickstart to data/: 100 million of C4, and its validation set.
#   download.sh [option ...]
# Takes the options of `hf download`. For text instead of tokens see training/DATA.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tokens=gpt2tok_c4_100_text_document validation=gpt2tok_c4_val_text_document
hf download ZahlenReal/diffusion_data_constraint_quickstart {$tokens,$validation}.{bin,idx} \
    --repo-type dataset --local-dir data "$@"
