#!/usr/bin/env bash
# Train one run in containers under Slurm with enroot and pyxis: runs train_slurm.sh with each task in IMAGE.
#   IMAGE=$PWD/scaling.sqsh MOUNTS=$SCRATCH/tokens:/tokens MODEL=425M DATA=/tokens/c4_text_document EPOCHS=1 \
#       sbatch examples_scaling/hpc/train_slurm_container.sh [section.key=value ...]
# IMAGE     image built from the Dockerfile: a file of `enroot import`, or registry#name:tag
# MOUNTS    host:container[,...], folders with the tokens; experiments/ of this checkout is always mounted
# MODEL, DATA, VALID and the other variables are as in settings.sh, with paths inside the container. Adapt the
# header to your cluster.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail
if [ -z "${SLURM_SUBMIT_DIR:-}" ]; then echo "error: not a Slurm job. Submit this script with sbatch." >&2; exit 2; fi
cd "$SLURM_SUBMIT_DIR"
if [ -z "${IMAGE:-}" ]; then echo "error: IMAGE: not set, expected a .sqsh file or registry#name:tag" >&2; exit 2; fi
inside=/opt/scaling
mkdir -p experiments
# shellcheck disable=SC2034
srun_words=(
    --container-image="$IMAGE"
    --container-mounts="$PWD/experiments:$inside/experiments${MOUNTS:+,$MOUNTS}"
    --container-workdir="$inside"
    --no-container-mount-home
)
source examples_scaling/training/train_slurm.sh
