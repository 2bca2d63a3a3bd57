#!/usr/bin/env bash
# Held-out loss of checkpoints on this machine.   validate.sh CHECKPOINT|RUN|STUDY PREFIX|DATAPATH [option ...]
# Relative paths are seen from the checkout, from wherever this is started.
# A process for each GPU (one process where there is none; GPUS says another number). What was scored before is skipped.
set -euo pipefail
if (($# < 2)); then echo "usage: validate.sh CHECKPOINT|RUN|STUDY PREFIX|DATAPATH [option ...]" >&2; exit 2; fi
cd "$(dirname "$0")/../.."
models=$1
data=$2
shift 2
gpus=${GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
exec python tools/start_ranks.py "$gpus" tools/validate.py "$models" --data "$data" "$@"
