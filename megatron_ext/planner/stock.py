"""Schedules that Megatron runs by itself, and how it then sends their messages.

They are what plans compare with, so they must be predicted as Megatron runs them, not as our
executor would.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.stock_executor import STOCK, StockExecutor


def run_by_stock(problem: Problem, spec: str, executor: StockExecutor) -> Problem:
    """Return ``problem`` for Megatron's own ``executor``, if Megatron has the schedule ``spec``.

    Otherwise the problem is unchanged.
    """
    is_stock = spec.partition(":")[0] in STOCK
    return replace(problem, stock=executor) if is_stock else problem
