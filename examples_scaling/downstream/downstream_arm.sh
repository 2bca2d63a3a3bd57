#!/usr/bin/env bash
# Score an autoregressive model on all tasks.   downstream_arm.sh [option ...]
# VARIANT: run in experiments; LOAD_TAG: one of its checkpoints, or latest; CHECKPOINT_PATH: another folder of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
VARIANT=${VARIANT:-arm_best_on_100m} LOAD_TAG=${LOAD_TAG:-latest} MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-32}
TASKS=${TASKS:-arc_easy,boolq,copa,hellaswag,piqa,race,winogrande,sciq,lambada_standard}
model=${CHECKPOINT_PATH:-experiments/$VARIANT}
if [ "$LOAD_TAG" != latest ]; then model=${CHECKPOINT_PATH:-experiments/$VARIANT/checkpoints}/$LOAD_TAG; fi
exec bash examples_scaling/downstream/downstream.sh ranking "$model" --tasks "$TASKS" \
    --batch-size "$MICRO_BATCH_SIZE" ${RESULT_PATH:+--out "${RESULT_PATH%.json}"} "$@"
