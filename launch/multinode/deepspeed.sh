#!/usr/bin/env bash
# launch/train.py on the nodes of a hostfile (a name and its number of GPUs per line) by DeepSpeed's launcher.
#   With passwordless ssh, once, on the first node:
#     HOSTFILE=launch/multinode/hostfile bash launch/multinode/deepspeed.sh --deepspeed_config … --model …
#   Without, on every node, numbered as in the hostfile:
#     NODE_RANK=0 MASTER_ADDR=node-a HOSTFILE=… bash launch/multinode/deepspeed.sh …
# The repository, the data and the environment must be at the same path on every node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

HOSTFILE=${HOSTFILE:-launch/multinode/hostfile}
if [ ! -f "$HOSTFILE" ]; then  # DeepSpeed would train on this node alone
    echo "error: no hostfile at $HOSTFILE; HOSTFILE names one, paths begin at $PWD" >&2
    exit 2
fi
PLACE=()
if [ -n "${NODE_RANK:-}" ]; then
    PLACE=(--no_ssh --node_rank "$NODE_RANK" --master_addr "${MASTER_ADDR:?the first node, as the others reach it}")
fi
exec "${PYTHON:-python}" -m deepspeed.launcher.runner --hostfile "$HOSTFILE" \
    --master_port "${MASTER_PORT:-29500}" "${PLACE[@]}" launch/train.py "$@"
