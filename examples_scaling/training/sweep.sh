#!/usr/bin/env bash
# Sweep the models of a study: train every run that has no result yet, small runs in parallel.
#   DATA=data/c4_text_document VALID=data/c4_val_text_document sweep.sh STUDY.yaml [--dry-run] [key=value ...]
#   ENGINE    torch (default) or deepspeed            DATA, VALID   .bin/.idx prefixes or files of utils/datapaths
#   LAUNCHER  local (default) or slurm                OUT           folder of the study
# Relative paths start at the checkout, whatever the working directory.
# After an interruption, run the same command again to resume. Other arguments are passed on to tools/sweep.py.
set -euo pipefail
if (($# < 1)); then echo "usage: sweep.sh STUDY.yaml [--dry-run] [key=value ...]" >&2; exit 2; fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec python tools/sweep.py "$1" --launcher "${LAUNCHER:-local}" "run.dist.engine=${ENGINE:-torch}" \
    ${DATA:+"run.dataset.path_train=$DATA"} \
    ${VALID:+"run.dataset.path_eval=$VALID"} \
    ${OUT:+"directory=$OUT"} \
    "${@:2}"
