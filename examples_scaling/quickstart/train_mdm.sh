#!/usr/bin/env bash
# Train the best masked-diffusion model on 100 million tokens of C4: 425M, 500 epochs.
#   train_mdm.sh [section.key=value ...]
# download.sh fetches the tokens. original_names.sh lists the variables; GPUS=4 sets the number of GPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
VARIANT=${VARIANT:-mdm_best_on_100m}
MODEL_PARAM=${MODEL_PARAM:-425M} DATA_CNT=${DATA_CNT:-100M} EPOCH_CNT=${EPOCH_CNT:-500}
TRAIN_DATA_PATH=${TRAIN_DATA_PATH:-utils/datapaths/train_c4_100m.txt}
VALID_DATA_PATH=${VALID_DATA_PATH:-utils/datapaths/val_c4.txt}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-8} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-256} ZERO_STAGE=${ZERO_STAGE:-0}
OBJECTIVE="mdm"
source examples_scaling/training/original_names.sh
