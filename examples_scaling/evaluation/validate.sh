#!/usr/bin/env bash
# Held-out loss of checkpoints on this machine.   validate.sh CHECKPOINT|RUN|STUDY PREFIX|DATAPATH [option ...]
# Relative paths start at the checkout, whatever the working directory.
# It starts one process per GPU, or one process without GPUs; GPUS sets another number. Scored checkpoints are skipped.
set -euo pipefail
if (($# < 2)); then echo "usage: validate.sh CHECKPOINT|RUN|STUDY PREFIX|DATAPATH [option ...]" >&2; exit 2; fi
cd "$(dirname "$0")/../.."
models=$1
data=$2
shift 2
gpus=${GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
exec python tools/start_ranks.py "$gpus" tools/validate.py "$models" --data "$data" "$@"
