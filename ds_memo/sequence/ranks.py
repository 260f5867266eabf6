"""The ranks that share a sequence, and their process groups."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ds_memo.distributed import agree
from ds_memo.errors import MemoConfigError


@dataclass(frozen=True, eq=False)
class SequenceRanks:
    """Ranks that share a sequence, as `ring` groups of `ulysses` ranks.

    The ranks of an Ulysses group trade tokens for heads. Those with one number in their Ulysses groups form a ring, around which
    keys and values travel. A rank's number among all is its ring number · ulysses + its Ulysses number.
    """

    group: dist.ProcessGroup
    """All that share the sequence."""
    ulysses_group: dist.ProcessGroup
    ring_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    """The same ranks, for what lies on the host: the device does not wait for it."""

    @functools.cached_property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @functools.cached_property
    def ulysses(self) -> int:
        return dist.get_world_size(self.ulysses_group)

    @functools.cached_property
    def ring(self) -> int:
        return dist.get_world_size(self.ring_group)

    @functools.cached_property
    def number(self) -> int:
        return dist.get_rank(self.group)

    @property
    def ulysses_number(self) -> int:
        return self.number % self.ulysses

    @property
    def ring_number(self) -> int:
        return self.number // self.ulysses

    def __deepcopy__(self, memo: dict) -> SequenceRanks:
        return self


ALONE = SequenceRanks(None, None, None, None)  # type: ignore[arg-type]
"""One rank, which has whole sequences: there are no groups."""
vars(ALONE).update(size=1, ulysses=1, ring=1, number=0)


@functools.cache
def ranks_of(group: dist.ProcessGroup, ulysses: int) -> SequenceRanks:
    """Make the subgroups, once; all ranks of the process must call this together.

    Args:
        group: this rank's; every rank of the run is in one such group, of as many ranks.
        ulysses: ranks that trade tokens for heads. It divides the group's size.
    """
    wholes = _of_all_ranks(dist.get_process_group_ranks(group))
    size = len(wholes[0])
    of_heads = [whole[start : start + ulysses] for whole in wholes for start in range(0, size, ulysses)]
    rings = [whole[number::ulysses] for whole in wholes for number in range(ulysses)]
    on_host = torch.device("cpu") in dist.group.WORLD._device_types
    return SequenceRanks(
        group,
        group if ulysses == size else _subgroups(of_heads),
        # DeepSpeed's groups are made with half an hour, and gloo's sends do not see that this is changed.
        group if ulysses == 1 and dist.get_backend(group) != "gloo" else _subgroups(rings),
        group if on_host else _subgroups(wholes, "gloo"),
    )


@functools.cache
def group_of(mesh: DeviceMesh | dist.ProcessGroup) -> tuple[dist.ProcessGroup, int | None]:
    """Return the group of a mesh's ranks, and how many of them trade heads if the mesh says so: its size along the second of
    two dimensions. All ranks of the process must call this together.

    Raises:
        MemoConfigError: it is no mesh of ranks in ascending order with one or two dimensions.
    """
    if isinstance(mesh, dist.ProcessGroup):
        return mesh, None
    ranks = mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else []
    if not ranks or mesh.ndim > 2 or ranks != sorted(ranks):
        raise MemoConfigError(
            f"mesh: got {mesh!r}; allowed: a DeviceMesh of the ranks that share a sequence, in ascending order: of one "
            'dimension, mesh["sp"], or of two, mesh["ring", "ulysses"]; or their process group'
        )
    return (mesh.get_group(), None) if mesh.ndim == 1 else (_subgroups(_of_all_ranks(ranks)), mesh.size(1))


def _of_all_ranks(own: Sequence[int]) -> list[list[int]]:
    """Return the groups of all ranks, given this rank's.

    Raises:
        MemoConfigError: they overlap or differ in size.
    """
    groups = sorted(set(map(tuple, agree.from_all_ranks(list(own)))))
    if len(set(map(len, groups))) > 1 or len(set(itertools.chain(*groups))) < sum(map(len, groups)):
        raise MemoConfigError(f"the ranks that share a sequence: got {groups}; allowed: groups of one size, each rank in one")
    return list(map(list, groups))


def _subgroups(of: Iterable[list[int]], backend: str | None = None) -> dist.ProcessGroup:
    """Make all of these groups and return this rank's."""
    own: dist.ProcessGroup | None = None
    default = dist.group.WORLD
    device = torch.device("cpu" if torch.device("cpu") in default._device_types else "cuda")
    timeout = default._get_backend(device).options._timeout  # else a lost rank would be waited for half an hour
    for ranks in of:
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    return own
