"""A small network whose passes are profiled, planned and followed, by the op alone. Used by the scenarios of each device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_memo.ops.allocator import MISSES, NATIVE, Allocator
from ds_memo.plan import Plan, plan_trace
from ds_memo.plan.phases import LayerPass
from ds_memo.planned_alloc.request_log import RequestLog, read_log

ROWS, WIDTH, LAYERS = 128, 512, 3


class Enter(torch.autograd.Function):
    """Identity: enters one phase in the forward and one in the backward, on whatever thread that runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, allocator: Allocator, forward: Any, backward: Any) -> torch.Tensor:
        ctx.allocator, ctx.backward_phase = allocator, backward
        allocator.phase(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        ctx.allocator.phase(ctx.backward_phase)
        return grad, None, None, None


class Net(nn.Module):
    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator = allocator
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = Enter.apply(x, self.allocator, LayerPass(i, backward=False), None)
            x = x + layer(x)
            x = Enter.apply(x, self.allocator, None, LayerPass(i, backward=True))
        return x


class Rig:
    """Args:
    device: where.
    rows: of the batch.
    """

    def __init__(self, device: torch.device, rows: int = ROWS) -> None:
        torch.manual_seed(0)
        self.device = device
        self.allocator = Allocator(device)
        self.allocator.install()
        self.net = Net(self.allocator).to(device)
        self.batch = torch.randn(rows, WIDTH, device=device)
        self.requests = 0
        """Requests of a pass that follows plan 0."""

    def forward_and_backward(self, rows: int | None = None) -> list[torch.Tensor]:
        """Return the loss and every gradient; the dropout masks are the same each time."""
        self.net.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = self.net(self.batch[:rows].clone().requires_grad_(True)).square().mean()
        loss.backward()
        self.allocator.phase(None)
        results = [loss.detach().clone(), *(p.grad.clone() for p in self.net.parameters())]
        self.net.zero_grad(set_to_none=True)
        return results

    def profile(self) -> RequestLog:
        self.allocator.profile()
        self.forward_and_backward()
        self.allocator.stop()
        log, _ = read_log(self.allocator.requests(), {})
        return log

    def plan(self) -> tuple[RequestLog, Plan]:
        """Profile twice, check that both agree, and plan."""
        log, again = self.profile(), self.profile()
        assert log == again, "two equal passes ask for different memory"
        return again, plan_trace(again.trace(), seconds=10)

    def use(self, log: RequestLog, plan: Plan) -> None:
        self.requests = sum(len(visit.sizes) for visit in log.visits)
        self.allocator.load_plan(0, log.slots({slot.id: slot.offset for slot in plan.slots}, NATIVE))
        self.allocator.reserve(plan.peak)

    def planned(self) -> Rig:
        self.use(*self.plan())
        return self

    def follow(self, rows: int | None = None) -> list[torch.Tensor]:
        """Run a pass that follows plan 0."""
        self.allocator.follow(0)
        try:
            return self.forward_and_backward(rows)
        finally:
            self.allocator.stop()

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Yield the nonzero hits and misses inside, by name."""
        before, counts = self.allocator.stats(), {}
        yield counts
        after = self.allocator.stats()
        counts |= {name: after[name] - before[name] for name in ("hit", *MISSES) if after[name] > before[name]}

    def a_block(self, nbytes: int = 1 << 20) -> torch.Tensor:
        """Return a tensor in an arena of its own, the only block of a plan. The caller ends the pass with allocator.stop()."""
        self.allocator.load_plan(1, [("embed", [(nbytes, 0), (nbytes, nbytes)])])
        self.allocator.reserve(2 * nbytes)
        self.allocator.follow(1)
        self.allocator.phase("embed")
        block = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        assert self.allocator.owns(block.data_ptr())
        return block.fill_(7)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Compare bitwise."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
