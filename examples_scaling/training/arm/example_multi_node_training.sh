#!/usr/bin/env bash
# Train a large autoregressive model on several nodes.
#   sbatch --nodes=4 example_multi_node_training.sh [section.key=value ...]
# DeepSpeed's ZeRO 1 with the optimizer on the host. original_names.sh lists the variables.
#SBATCH --job-name=train --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 --time=24:00:00
#SBATCH --output=%x-%j.log --open-mode=append --requeue --signal=B:USR1@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
VARIANT=${VARIANT:-${SLURM_JOB_NAME:-multi_node_arm}}
MODEL_PARAM=${MODEL_PARAM:-2298M} DATA_CNT=${DATA_CNT:-500M} EPOCH_CNT=${EPOCH_CNT:-363}
TRAIN_DATA_PATH=${TRAIN_DATA_PATH:-utils/datapaths/c4.txt}
VALID_DATA_PATH=${VALID_DATA_PATH:-utils/datapaths/val_c4.txt}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-2} GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-256} ZERO_STAGE=${ZERO_STAGE:-1}
OBJECTIVE="ar" ENGINE=${ENGINE:-deepspeed} # offload_optimizer is its option
source examples_scaling/training/original_names.sh dist.offload_optimizer=true "$@"
