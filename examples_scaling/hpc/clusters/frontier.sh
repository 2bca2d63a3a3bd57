# shellcheck shell=bash disable=SC2034
# Systems such as Frontier and LUMI: AMD GPUs with ROCm on a Slingshot network. Sourced for CLUSTER=frontier by
# examples_scaling/training/settings.sh. Variables that are already set keep their values.
# RCCL reads NCCL's variables. Without the first it may choose a network that does not reach the other nodes.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-hsn0,hsn1,hsn2,hsn3}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-hsn0}
export NCCL_NET_GDR_LEVEL=${NCCL_NET_GDR_LEVEL:-3} # GPU to network card, without a copy in host memory
export NCCL_CROSS_NIC=${NCCL_CROSS_NIC:-1}
export NCCL_ALGO=${NCCL_ALGO:-Ring}            # the algorithm of every collective; Tree has all-reduce only
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # a rank has seven cores, which its data threads use
export MASTER_PORT=${MASTER_PORT:-3442}        # a node runs one job
# Older scripts name the hub's cache so; transformers 5 and huggingface_hub read only HF_HUB_CACHE
export TRANSFORMERS_CACHE=${TRANSFORMERS_CACHE:-${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}/hub}}
export HF_HUB_CACHE=${HF_HUB_CACHE:-$TRANSFORMERS_CACHE}
# libfabric's provider for Slingshot: a memory monitor that does not deadlock, and queues for a large job's messages
export FI_MR_CACHE_MONITOR=${FI_MR_CACHE_MONITOR:-kdreg2}
export FI_CXI_DEFAULT_CQ_SIZE=${FI_CXI_DEFAULT_CQ_SIZE:-131072}
export FI_CXI_DEFAULT_TX_SIZE=${FI_CXI_DEFAULT_TX_SIZE:-2048}
export CXI_FORK_SAFE=${CXI_FORK_SAFE:-1} CXI_FORK_SAFE_HP=${CXI_FORK_SAFE_HP:-1}
# MIOpen's database cannot be on Lustre or be shared by ranks
around=(bash examples_scaling/hpc/with_private_cache.sh)
