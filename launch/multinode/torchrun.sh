#!/usr/bin/env bash
# launch/train.py on several nodes by torchrun. On every node, numbered from 0:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node-a bash launch/multinode/torchrun.sh --deepspeed_config … --model …
# GPUS: processes per node (all GPUs). Slurm's own variables do as well: see slurm.sbatch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${NNODES:-${SLURM_NNODES:?or NNODES: number of nodes}}" --node_rank "${NODE_RANK:-${SLURM_NODEID:?or NODE_RANK: number of this node}}" \
    --nproc_per_node "${GPUS:-gpu}" \
    --master_addr "${MASTER_ADDR:?the first node, as the others reach it}" --master_port "${MASTER_PORT:-29500}" \
    launch/train.py "$@"
