"""python examples/attach.py

Shows `ds_memo.attach` on a plain nn.Module, without DeepSpeed's engine; it finds the layers in `model.blocks`. One of them
keeps its activations on the device. In the others half of the tokens' wait on the host, and the other half are recomputed.
"""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ds_memo

SEQ, STEPS, HIDDEN, HEADS, LAYERS = 1024, 10, 128, 4, 4  # tokens are bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, tokens, HIDDEN)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, 256)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)  # flash needs 16 bits
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in sources)), dtype=torch.uint8).long()
model = Model().to(device, dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})  # left out, both are measured and solved for
for step, window in enumerate(data.split(SEQ + 1)[:STEPS], start=1):
    tokens = window.to(device)
    loss = F.cross_entropy(model(tokens[None, :-1])[0].float(), tokens[1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
print(ds_memo.report(handle))
handle.detach()
