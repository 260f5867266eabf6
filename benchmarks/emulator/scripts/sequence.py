"""Layers whose ranks share each sequence: memory, bytes sent, what waits, and keys and values around the ring.

    python -m benchmarks.rehearsal --ranks 16 --rank 5 --device-gib 80 benchmarks/emulator/scripts/sequence.py llama8b 1M 16

This is one of 16 ranks of two nodes that do all the same. Arguments: llama8b or qwen3next, of 4 layers or as many as
llama8b:32 says, the tokens of a sequence, the ranks that share it, the "memo" section's JSON, and "order" to look for
accesses that nothing orders instead. Qwen3-Next has dense MLPs, and scans and convolutions of ds_memo/estimate/mixer_kernels.py.
A unit is the tokens of a part · hidden size · 2 bytes. Memory is what layers
add at their peak. Weights that ZeRO-3 gathers are part of it: the difference between two lengths is without them.
"""

import collections
import itertools
import json
import sys

import deepspeed
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

import ds_memo
from benchmarks import emulated_ranks
from benchmarks.emulated_calls import SYNCHRONIZING, Calls
from benchmarks.emulated_order import Unordered
from ds_memo.cli.arguments import tokens
from ds_memo.deepspeed import sequence
from ds_memo.units import GIB

STEPS = 5
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
torch.backends.cudnn.enabled = False  # it wants a driver


class InLayers:
    """Tells the step's part between the embedding and the last norm, forward and backward, from the rest."""

    def __init__(self, decoder):
        self.calls, self.peak, self.sent = Calls(), 0, collections.Counter()
        self.inside, self.outside, self.held = collections.Counter(), collections.Counter(), collections.Counter()
        decoder.embed_tokens.register_forward_hook(self.embedded)
        decoder.norm.register_forward_pre_hook(self.before_norm)

    def embedded(self, module, args, out):
        out.register_hook(lambda gradient: self.leave())
        self.enter()

    def before_norm(self, module, args):
        self.leave()
        args[0].register_hook(lambda gradient: self.enter())

    def enter(self):
        self.outside += self.calls.counts
        self.calls.forget()
        self.before = collections.Counter(emulated_ranks.sent)
        torch.cuda.reset_peak_memory_stats()

    def leave(self):
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        self.sent += emulated_ranks.sent - self.before
        self.inside += self.calls.counts
        self.held += self.calls.held
        self.calls.forget()


def train(part):
    logits = engine(**{key: x for key, x in part.items() if key != "labels"}, use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, -2), part["labels"].flatten())
    engine.backward(sequence.mean_over_ranks(loss, part["labels"], engine))


name, words, ranks, *memo = (word for word in sys.argv[1:] if word != "order")
name, _, of_layers = name.partition(":")
length, ranks, count = tokens(words), int(ranks), int(of_layers or 4)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "sequence_parallel_size": ranks,
    "memo": {"enabled": True, "plan": {"enabled": False}} | json.loads(memo[0] if memo else "{}"),
}
shape = {"num_hidden_layers": count, "max_position_embeddings": length, "dtype": "bfloat16"}
deepspeed.init_distributed()
with torch.device("cuda"):
    if name == "llama8b":
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, **LLAMA, **shape))
    else:
        model = Qwen3NextForCausalLM(Qwen3NextConfig(intermediate_size=5120, mlp_only_layers=list(range(count)), **shape))
engine, *_ = ds_memo.initialize(model=model, model_parameters=model.parameters(), config=config)
whole = {"input_ids": torch.zeros(1, length, dtype=torch.long), "position_ids": torch.arange(length)[None]}
parts = sequence.split(itertools.repeat(whole | {"labels": whole["input_ids"]}), engine.device)
for part in itertools.islice(parts, STEPS - 1):
    train(part)
    engine.step()
part, before = next(parts), torch.cuda.memory_allocated()
if sys.argv[-1] == "order":
    with Unordered() as found:
        train(part)
    print(found)
    sys.exit()
emulated_ranks.most_received.clear()
layers = InLayers(model.model)
with layers.calls:
    train(part)
report = ds_memo.report(engine)
unit = part["labels"].numel() * model.config.hidden_size * 2
print(f"{name}, {length:,} tokens on {ranks} ranks; unit {unit / GIB:.4f} GiB; alpha {report['alpha']}, tiles {report['tiles']}")
print(f"layers add {(layers.peak - before) / GIB:.3f} GiB at their peak, {(layers.peak - before) / unit:.3f} units")
print(f"stalls by copies: {report['stall_s']} s; warnings: {report['warnings']}")
for (kind, way), nbytes in sorted(layers.sent.items()):
    print(f"in layers, sent by {kind} {way}: {nbytes / GIB:.3f} GiB, {nbytes / unit / count:.3f} units a layer")
for dtype, most in emulated_ranks.most_received.items():
    print(f"received from one rank and alive, {dtype}: {most / GIB:.3f} GiB, {most / unit:.3f} units")
for place, counts in (("in layers", layers.inside), ("outside", layers.outside + layers.calls.counts)):
    for (call, who, where), times in sorted(counts.items()):
        if call in SYNCHRONIZING:
            print(f"{place}, the host waits {times:5d} times: {call} by {who}, {where}")
for (who, where), seconds in layers.held.most_common(12):
    print(f"in layers, compute waits {1e3 * seconds:9.3f} ms: {who}, {where}")
