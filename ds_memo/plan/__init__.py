"""The memory planner: from a request trace to a verified address for every tensor. Importing it loads neither torch nor a
solver.

    from ds_memo.plan import plan_trace, read_trace
    plan = plan_trace(read_trace("trace.txt"))
    plan.peak, plan.lower_bound, plan.proven

| file | subject |
|---|---|
| phases.py | names of phases |
| trace.py | requests, phases, tensors |
| repetition.py | traces that repeat requests, tile by tile: one copy is planned |
| formats.py, snapshot.py | text traces, plan JSON; PyTorch memory snapshots |
| dsa.py | buffers, lifespans, lower bound, sections |
| greedy.py, search.py, milp.py | three ways to place buffers |
| solver.py | one problem, all three in order, with a deadline |
| levels.py | the paper's two levels |
| bilevel.py | a whole iteration: greedy over everything, the two levels, a flat plan |
| rescale.py | a plan for another sequence length |
| verify.py | the independent check that every plan passes |
"""

from ds_memo.plan.bilevel import Plan, Slot, plan_trace
from ds_memo.plan.errors import PlanError
from ds_memo.plan.formats import plan_from_json, plan_to_json, read_plan, read_trace
from ds_memo.plan.solver import PlanSolution, solve

__all__ = [
    "Plan",
    "PlanError",
    "PlanSolution",
    "Slot",
    "plan_from_json",
    "plan_to_json",
    "plan_trace",
    "read_plan",
    "read_trace",
    "solve",
]  # fmt: skip
