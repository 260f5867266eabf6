"""The handle of a model under ds_memo: what users hold."""

from __future__ import annotations

from ds_memo.config import MemoConfig
from ds_memo.plan import Plan
from ds_memo.runtime.report import report
from ds_memo.runtime.session import Session
from ds_memo.show.report_table import Report


class MemoHandle:
    """A model under ds_memo. ``ds_memo.attach`` returns it, and an engine of ``ds_memo.initialize`` has it as ``engine.memo``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def config(self) -> MemoConfig:
        """The "memo" section, checked."""
        return self._session.config

    @property
    def plan(self) -> Plan | None:
        """The plan of memory addresses that the latest training pass followed; None before there is one.

        ``ds_memo.plan.plan_to_json`` writes it, and ``ds-memo show`` draws what it wrote.
        """
        return self._session.addresses.plan

    def report(self) -> Report:
        """Return what is set and what happened so far: bytes, seconds and counts of this rank.

        Raises:
            MemoError: after ``detach()``.
        """
        return report(self._session)

    def release_arena(self) -> int:
        """Give the arena of planned addresses back to PyTorch's allocator, say for an evaluation that needs the memory.

        The next training forward takes it again.

        Returns:
            The bytes that it had; 0 if there is none.
        """
        return self._session.addresses.release_arena()

    def detach(self) -> None:
        """Give the model back as it was. Graphs made before can no longer be run backward.

        Raises:
            MemoError: the model is detached already, or one of its layers runs.
        """
        self._session.detach()
