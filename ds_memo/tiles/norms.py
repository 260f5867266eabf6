"""Norms beside the layers, in tiles. An eager norm makes five to ten copies of its input, more than a tiled layer takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ds_memo.remat.autocast import autocast_as, autocast_now
from ds_memo.remat.layer_state import unchanged
from ds_memo.remat.undo import Undoing, stacks_restored
from ds_memo.spans import spans
from ds_memo.tiles.aliases import aliased, dropping, places_of, refuse_create_graph
from ds_memo.tiles.check import compare
from ds_memo.tiles.gradient_owner import is_owned
from ds_memo.tiles.slices import fill, new_whole, parts
from ds_memo.tiles.weight_gradients import GradientSums


def norms_beside(model: nn.Module, layers: Iterable[str]) -> Iterator[nn.Module]:
    """Yield the modules with no weights but vectors (norms) that stand beside the list of layers.

    Args:
        layers: names of the layers, e.g. ``model.layers.0``.
    """
    modules = dict(model.named_modules())
    for owner in dict.fromkeys(".".join(name.split(".")[:-2]) for name in layers):
        for child in modules[owner].children():
            weights = list(child.parameters())
            if weights and not list(child.children()) and all(weight.dim() == 1 for weight in weights):
                yield child


class TiledNorm:
    """Runs a norm in tiles. It must treat each token by itself, which its first call in tiles checks.

    Args:
        tile_tokens: returns the tokens of a tile.
        warn: warns the user.
    """

    def __init__(self, module: nn.Module, tile_tokens: Callable[[], int], warn: Callable[[str], None]) -> None:
        self._module = module
        self._tile_tokens = tile_tokens
        self._warn = warn
        self._by_token: bool | None = None
        """None before the first call in tiles."""

    def __call__(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            return forward(*args, **kwargs)
        tiles = spans(x.shape[0], x.shape[1], self._tile_tokens())
        if len(tiles) == 1:
            return forward(x)
        if self._by_token is None:
            with unchanged(self._module):
                self._by_token = not list(self._module.buffers()) and compare.is_by_token(forward, x)
            if not self._by_token:
                self._warn(
                    f"{type(self._module).__name__} beside the layers runs whole, not in tiles of memo.tile_tokens: it mixes "
                    "tokens, or has buffers"
                )
        if not self._by_token:
            return forward(x)
        trained = [weight for weight in self._module.parameters() if weight.requires_grad]
        return _TiledNorm.apply(self._module, forward, tiles, x, *trained)


class _TiledNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, forward: Any, tiles: Any, x: torch.Tensor, *trained: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x, *trained)
        ctx.how = module, forward, tiles, autocast_now()
        output, outputs = None, []
        with stacks_restored(), torch.enable_grad(), dropping():
            for number, x_tile in enumerate(parts(x.detach(), tiles, 1)):
                tile = forward(x_tile.detach().requires_grad_()).detach()
                if output is None:
                    output = new_whole(tile, x.shape[0], x.shape[1], 1)
                    outputs = parts(output, tiles, 1)
                outputs[number].copy_(tile)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        d_x = gradient if is_owned(gradient) else None
        refuse_create_graph()
        x, *trained = ctx.saved_tensors
        module, forward, tiles, autocast = ctx.how
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format) if d_x is None or d_x.dtype != x.dtype else d_x
        using_aliases = aliased(places_of(module), trained)
        with stacks_restored(), autocast_as(autocast), using_aliases as aliases, Undoing(torch.clear_autocast_cache):
            sums = GradientSums(aliases)
            for x_tile, d_tile, of_tile in zip(*(parts(whole, tiles, 1) for whole in (x, d_x, gradient)), strict=True):
                tile = x_tile.detach().requires_grad_()
                with torch.enable_grad():
                    output = forward(tile)
                fill(d_tile, *sums.backward([output], [of_tile], [tile]))
            return None, None, None, d_x, *sums.take()
