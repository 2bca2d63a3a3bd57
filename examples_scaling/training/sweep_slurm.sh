#!/usr/bin/env bash
# One run of a sweep: a task of the job array that tools/sweep.py --launcher slurm submits and monitors.
# Adapt the header to your cluster, or pass options with the sweep: --sbatch=--partition=gpu --sbatch=--time=4:00:00
# Two minutes before its time limit, or when preempted, a task saves, requeues itself and resumes.
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
# Slurm runs a copy of this script from another folder, so requeue.sh is located through the path of pretrain.py:
# beside it in an installed wheel, else in the checkout
scripts=$(dirname "$pretrain")
[ -f "$scripts/requeue.sh" ] || scripts=$scripts/../examples_scaling/training
# shellcheck source=examples_scaling/training/requeue.sh
source "$scripts/requeue.sh"
requeue srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    python "$pretrain" "$folder/config.yaml"
