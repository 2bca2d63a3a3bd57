#!/usr/bin/env bash
# The value of repeated text: FLOPS_FACTOR x 1e18 FLOPs, 6 N D, spent on EPOCH_CNT epochs of the first tokens of C4.
# FLOPS_FACTOR: 10, 30 or 100. ladder_epochs.yaml trains all of them.   bash or sbatch, as example_training.sh
#SBATCH --job-name=train --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 --time=24:00:00
#SBATCH --output=%x-%j.log --open-mode=append --requeue --signal=B:USR1@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
MODEL_PARAM=${MODEL_PARAM:-217M} FLOPS_FACTOR=${FLOPS_FACTOR:-10} EPOCH_CNT=${EPOCH_CNT:-1}
VARIANT=${VARIANT:-data_value_arm_${MODEL_PARAM}_${FLOPS_FACTOR}e18_${EPOCH_CNT}ep}
TRAIN_DATA_PATH=${TRAIN_DATA_PATH:-utils/datapaths/train_c4_full.txt}
VALID_DATA_PATH=${VALID_DATA_PATH:-utils/datapaths/val_c4.txt}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-8} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-256} ZERO_STAGE=${ZERO_STAGE:-0}
OBJECTIVE="ar"
source examples_scaling/training/original_names.sh
