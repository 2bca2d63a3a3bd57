#!/usr/bin/env bash
# Start the ranks of one node with torch's launcher.
#   srun --ntasks-per-node=1 launch.sh tools/pretrain.py CONFIG.yaml ...
# GPUS_PER_NODE: ranks of a node, default SLURM_GPUS_ON_NODE. MASTER_PORT: default 9999. train_slurm.sh uses srun alone.
set -euo pipefail
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_NODE=${MASTER_NODE:-${nodes[0]}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
echo "node $SLURM_PROCID of $SLURM_JOB_NUM_NODES, master $MASTER_NODE:${MASTER_PORT:=9999}" >&2
exec python -u -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --node_rank="$SLURM_PROCID" \
    --nproc_per_node="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" \
    --master_addr="$MASTER_NODE" --master_port="$MASTER_PORT" "$@"
