#!/usr/bin/env bash
# Sweep the models of a study: train every run of it that has no result yet, small ones side by side.
#   DATA=data/c4_text_document VALID=data/c4_val_text_document sweep.sh STUDY.yaml [--dry-run] [key=value ...]
#   ENGINE    deepspeed (by itself) or torch          DATA, VALID   .bin/.idx prefixes or files of utils/datapaths
#   LAUNCHER  local (by itself) or slurm              OUT           folder of the study
# Run the same command again to go on after a stop. Other words go to tools/sweep.py, whose --help lists them.
set -euo pipefail
if (($# < 1)); then echo "usage: sweep.sh STUDY.yaml [--dry-run] [key=value ...]" >&2; exit 2; fi
study=$(realpath "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec python tools/sweep.py "$study" --launcher "${LAUNCHER:-local}" "run.dist.engine=${ENGINE:-deepspeed}" \
    ${DATA:+"run.dataset.path_train=$DATA"} \
    ${VALID:+"run.dataset.path_eval=$VALID"} \
    ${OUT:+"directory=$OUT"} \
    "$@"
