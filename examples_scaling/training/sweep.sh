#!/usr/bin/env bash
# Sweep the models of a study: train every run of it that has no result yet, small ones side by side.
#   DATA=data/c4_text_document VALID=data/c4_val_text_document sweep.sh STUDY.yaml [--dry-run] [key=value ...]
#   ENGINE    deepspeed (by itself) or torch          DATA, VALID   .bin/.idx prefixes or files of utils/datapaths
#   LAUNCHER  local (by itself) or slurm              OUT           folder of the study
# Relative paths are seen from the checkout, from wherever this is started.
# Run the same command again to go on after a stop. Other words go to tools/sweep.py, whose --help lists them.
set -euo pipefail
if (($# < 1)); then echo "usage: sweep.sh STUDY.yaml [--dry-run] [key=value ...]" >&2; exit 2; fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec python tools/sweep.py "$1" --launcher "${LAUNCHER:-local}" "run.dist.engine=${ENGINE:-deepspeed}" \
    ${DATA:+"run.dataset.path_train=$DATA"} \
    ${VALID:+"run.dataset.path_eval=$VALID"} \
    ${OUT:+"directory=$OUT"} \
    "${@:2}"
