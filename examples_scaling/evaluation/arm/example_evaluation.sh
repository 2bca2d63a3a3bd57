#!/usr/bin/env bash
# Held-out loss of an autoregressive run.   example_evaluation.sh [option of tools/validate.py ...]
# VARIANT: folder in experiments, or CHECKPOINT_PATH. EVAL_ITERS limits the samples; default: all.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
VARIANT=${VARIANT:-example_arm} VALID_DATA_PATH=${VALID_DATA_PATH:-utils/datapaths/val_c4.txt}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-8} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-256}
exec bash examples_scaling/evaluation/validate.sh "${CHECKPOINT_PATH:-experiments/$VARIANT}" "$VALID_DATA_PATH" \
    --batch-size "$MICRO_BATCH_SIZE" ${EVAL_ITERS:+--max-samples "$((EVAL_ITERS * GLOBAL_BATCH_SIZE))"} "$@"
