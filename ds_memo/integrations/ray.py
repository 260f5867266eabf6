"""Ray: bring memo into the processes of actors, and say in a driver that it does not come there.

    ray.init(runtime_env={"worker_process_setup_hook": ds_memo.ray_setup({"enabled": True})})
    ds-memo run python driver.py          # ray.init() starts the cluster, whose processes inherit the environment

Ray's daemon starts the workers: what install() changed in the driver's Python is not in them. Nothing here imports ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ds_memo.errors import warn
from ds_memo.runtime.launched_by import LISTENER

NOT_REACHED = (
    "this process starts Ray's workers, and ds_memo.install() here does not reach them, {}. For training in actors pass "
    'ray.init(runtime_env={{"worker_process_setup_hook": ds_memo.ray_setup()}}), or start this script by `ds-memo run python '
    "driver.py`, if its ray.init() starts the cluster"
)


def ray_setup(memo: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """Return a hook that calls install() in each worker of a Ray job::

        ray.init(runtime_env={"worker_process_setup_hook": ds_memo.ray_setup({"enabled": True})})

    Where Ray asks for the hook's name, as ``ray job submit`` does, give "ds_memo.ray_setup": in a worker this function installs.

    Args:
        memo: the section for configurations that have none. It travels with the hook.

    Raises:
        MemoConfigError: a value in `memo` is refused.
    """
    if memo is not None:
        from ds_memo.config import memo_config

        memo_config(memo)

    def ds_memo_ray_setup() -> None:
        from ds_memo import install

        install(memo)

    if _is("WORKER_MODE"):
        ds_memo_ray_setup()
    return ds_memo_ray_setup


def warn_in_drivers() -> None:
    """Warn when this process, which has imported Ray, starts it, or has started it, and the workers are not under memo."""
    if _look not in (hooks := _after_init()):
        hooks.append(_look)
        _look()


def warn_no_more() -> None:
    """Undo warn_in_drivers()."""
    if "ray" in sys.modules and _look in (hooks := _after_init()):
        hooks.remove(_look)


def _after_init() -> list[Callable[[], None]]:
    """Return what Ray calls after each ray.init(), implicit ones too, as Ray Tune uses it. A Ray without it calls nothing."""
    return getattr(sys.modules["ray"]._private.worker, "_post_init_hooks", [])


def _look() -> None:
    """Warn in a driver, unless its workers run our hook, or inherit the environment of `ds-memo run`."""
    if not _is("SCRIPT_MODE"):
        return
    ray = sys.modules["ray"]
    hook = ray.get_runtime_context().runtime_env.get("worker_process_setup_hook")
    started_here = getattr(ray._private.worker._global_node, "head", False)  # Ray Client has no node
    if not (started_here and LISTENER in os.environ) and not str(hook).endswith(("ray_setup", "install")):
        theirs = f"nor does their setup hook {hook}, unless it calls ds_memo.install()" if hook else "and they have no setup hook"
        warn(NOT_REACHED.format(theirs))


def _is(mode: str) -> bool:
    """Return True if this process is connected to Ray in a mode that Ray has this name for."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == getattr(ray, mode)
