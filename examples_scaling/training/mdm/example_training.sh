#!/usr/bin/env bash
# Train a masked-diffusion model: bash on this machine, sbatch under Slurm.
#   example_training.sh [section.key=value ...]
# original_names.sh lists the variables.
#SBATCH --job-name=train --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 --time=24:00:00
#SBATCH --output=%x-%j.log --open-mode=append --requeue --signal=B:USR1@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
VARIANT=${VARIANT:-example_mdm}
MODEL_PARAM=${MODEL_PARAM:-425M} DATA_CNT=${DATA_CNT:-100M} EPOCH_CNT=${EPOCH_CNT:-100}
TRAIN_DATA_PATH=${TRAIN_DATA_PATH:-utils/datapaths/train_c4_100m.txt}
VALID_DATA_PATH=${VALID_DATA_PATH:-utils/datapaths/val_c4.txt}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-8} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-256} ZERO_STAGE=${ZERO_STAGE:-0}
OBJECTIVE="mdm"
source examples_scaling/training/original_names.sh
