#!/usr/bin/env bash
# Downstream scores of checkpoints on this machine.   downstream.sh ranking|generation CHECKPOINT|RUN|STUDY [option ...]
# Relative paths start at the checkout, whatever the working directory.
# It starts one process per GPU, or one process without GPUs; GPUS sets another number. Scored checkpoints are skipped.
set -euo pipefail
if (($# < 2)); then echo "usage: downstream.sh ranking|generation CHECKPOINT|RUN|STUDY [option ...]" >&2; exit 2; fi
cd "$(dirname "$0")/../.."
kind=$1
models=$2
shift 2
case $kind in
    ranking) tasks=arc_easy,boolq,copa,hellaswag,piqa,race,winogrande,sciq ;;
    generation) tasks=lambada_openai ;;
    *) echo "error: got $kind, expected ranking or generation" >&2; exit 2 ;;
esac
gpus=${GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
exec python tools/start_ranks.py "$gpus" tools/evaluate_downstream.py "$models" --tasks "$tasks" "$@"
