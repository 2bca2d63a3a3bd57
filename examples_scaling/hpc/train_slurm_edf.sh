#!/usr/bin/env bash
# Train one run under Slurm on Alps, with each task in the container of EDF: runs train_slurm.sh.
#   EDF=$PWD/examples_scaling/hpc/alps.toml MODEL=425M DATA=/tokens/c4_text_document EPOCHS=1 ENGINE=torch \
#       sbatch --account=PROJECT examples_scaling/hpc/train_slurm_edf.sh [section.key=value ...]
# EDF is an environment definition file: an absolute path, or a name in ~/.edf. Paths are those in the container.
#SBATCH --job-name=train --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=72 --time=24:00:00
#SBATCH --output=%x-%j.log --open-mode=append --requeue --signal=B:USR1@120
set -euo pipefail
if [ -z "${SLURM_SUBMIT_DIR:-}" ]; then echo "error: not a Slurm job. Submit this script with sbatch." >&2; exit 2; fi
cd "$SLURM_SUBMIT_DIR"
if [ -z "${EDF:-}" ]; then echo "error: EDF: not set, expected an environment definition file" >&2; exit 2; fi
# shellcheck disable=SC2034,SC1091
srun_words=(--environment="$EDF")
# shellcheck source=examples_scaling/training/train_slurm.sh
source examples_scaling/training/train_slurm.sh
