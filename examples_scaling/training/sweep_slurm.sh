#!/usr/bin/env bash
# One run of a sweep: the task of an array that tools/sweep.py --launcher slurm submits, which follows it.
# Change the header to your cluster's words, or give them to the sweep: --sbatch=--partition=gpu --sbatch=--time=4:00:00
# Two minutes before its time is up, or when preempted, a task saves, puts itself into the queue again and goes on.
#SBATCH --job-name=sweep
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=/dev/null
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submitted by tools/sweep.py}"
usage="usage: sweep_slurm.sh LIST PRETRAIN.py, as an array"
pretrain=${2:?$usage}
folder=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$1")
exec >>"$folder/log.txt" 2>&1
# this is a copy of the script, in a folder of Slurm: what lies beside it is found by the other file of the checkout
# shellcheck source=examples_scaling/training/requeue.sh
source "$(dirname "$pretrain")/../examples_scaling/training/requeue.sh"
requeue srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    python "$pretrain" "$folder/config.yaml"
