#!/usr/bin/env bash
# Held-out loss of the model of train_mdm.sh.   eval_mdm.sh [option of tools/validate.py ...]
# EVAL_ITERS limits the samples to EVAL_ITERS x GLOBAL_BATCH_SIZE; default: all. NUM_MC: masks for each sample.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
VARIANT=${VARIANT:-mdm_best_on_100m} VALID_DATA_PATH=${VALID_DATA_PATH:-utils/datapaths/val_c4.txt}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-8} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-256}
exec bash examples_scaling/evaluation/validate.sh "${CHECKPOINT_PATH:-experiments/$VARIANT}" "$VALID_DATA_PATH" \
    --batch-size "$MICRO_BATCH_SIZE" --num-mc "${NUM_MC:-8}" \
    ${EVAL_ITERS:+--max-samples "$((EVAL_ITERS * GLOBAL_BATCH_SIZE))"} "$@"
