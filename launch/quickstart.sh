#!/usr/bin/env bash
# One command on a fresh machine: set everything up, then train a small model on real text twice, with memo and without,
# and compare the two runs.   bash launch/quickstart.sh
# launch/text is Shakespeare, in the public domain: the first 193 KB of Tiny Shakespeare (karpathy/char-rnn), in eight files.
# Settings by environment: STEPS (10), SEQ (2048 tokens), OUT (runs/quickstart).
set -euo pipefail
EXTRA=hf . "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

STEPS=${STEPS:-10} SEQ=${SEQ:-2048} OUT=${OUT:-runs/quickstart}
GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if [ "$GPUS" -gt 0 ]; then
    RANKS=1 CONFIG=ds_configs/quickstart_bf16.json
    [ "$GPUS" -eq 1 ] || RANKS=2 CONFIG=ds_configs/quickstart_bf16_ulysses2.json
else
    RANKS=2 CONFIG=ds_configs/quickstart.json
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 LOCAL_SIZE=2
fi
export PYTHONWARNINGS=ignore::FutureWarning  # torch's about names that DeepSpeed still uses

train() {
    "$PYTHON" -m deepspeed.launcher.runner --log_level warning --num_gpus "$RANKS" --master_port "$(free_port)" launch/train.py \
        --deepspeed_config "$CONFIG" --model ds_configs/models/tiny.json --data launch/text --seq-length "$SEQ" --steps "$STEPS" "$@"
}
free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }

say "training with memo: $RANKS ranks, sequences of $SEQ tokens, $STEPS steps"
train --metrics-json "$OUT/memo.json"
say "the same without memo"
train --metrics-json "$OUT/plain.json" --no-memo
say "with memo and without"
"$PYTHON" launch/compare.py "$OUT/memo.json" "$OUT/plain.json"
[ -z "$ACTIVATE" ] || say "before ds-memo, torchrun or deepspeed, run in this folder: $ACTIVATE"
