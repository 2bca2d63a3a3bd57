#!/usr/bin/env bash
# Train one run on this machine, a process for each GPU (one process where there is none; GPUS says another number).
#   MODEL=425M DATA=utils/datapaths/c4.txt EPOCHS=100 OBJECTIVE=mdm train.sh [section.key=value ...]
# Relative paths are seen from the checkout, from wherever this is started.
# settings.sh lists the variables. Run the same command again to go on after a stop.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples_scaling/training/settings.sh
gpus=${GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
command=(tools/pretrain.py "$config" "${words[@]}")
if [ "$gpus" = 1 ]; then exec "${around[@]}" python "${command[@]}"; fi
exec "${around[@]}" python tools/start_ranks.py "$gpus" "${command[@]}"
