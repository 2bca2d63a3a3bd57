#!/usr/bin/env bash
# Train one run on this machine with one process per GPU, or one process without GPUs; GPUS sets another number.
#   MODEL=425M DATA=utils/datapaths/c4.txt EPOCHS=100 OBJECTIVE=mdm train.sh [section.key=value ...]
# Relative paths start at the checkout, whatever the working directory.
# settings.sh lists the variables. After an interruption, run the same command again to resume.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples_scaling/training/settings.sh
gpus=${GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
command=(tools/pretrain.py "$config" "${words[@]}")
if [ "$gpus" = 1 ]; then exec "${around[@]}" python "${command[@]}"; fi
exec "${around[@]}" python tools/start_ranks.py "$gpus" "${command[@]}"
