"""What is wrong with routes of micro-batches over the nodes of a slow network."""

from __future__ import annotations

from itertools import pairwise

from shoal.plan.routes.conflicts import Routes, _crowd, _meeting
from shoal.plan.routes.path import RouteProblem


def violation(problem: RouteProblem, routes: Routes) -> str:
    """What is wrong with a plan, in words; empty if nothing is."""
    low, high = problem.visits
    counts = [0] * len(problem.stages)
    for mb, route in enumerate(routes.passes):
        nodes = routes.nodes(mb)
        stages = [problem.stage_of[n] for n in nodes]
        if nodes[0] != problem.start(mb) or len(set(stages)) != problem.keep:
            return f"micro-batch {mb} visits stages {stages}"
        for node in nodes:
            if not problem.in_flight[node]:
                return f"micro-batch {mb} visits node {node}, which has no memory"
        for stage in stages:
            counts[stage] += 1
        order = stages[1:]
        at = 0
        while at + 1 < len(order):
            if order[at] > order[at + 1]:
                if not problem.swap or order[at] != order[at + 1] + 1:
                    return f"micro-batch {mb} visits stages {stages} out of order"
                order[at], order[at + 1] = order[at + 1], order[at]
                at += 1
            at += 1
        if order != sorted(order):
            return f"micro-batch {mb} visits stages {stages} out of order"
        for one, after in pairwise(route):
            link = problem.links[one.node][after.node]
            if link is None or after.start < one.end + link:
                return f"micro-batch {mb}: {after} comes too early after {one}"
    for stage, count in enumerate(counts[1:], 1):
        if not low <= count <= high:
            return f"stage {stage} is visited by {count} micro-batches"
    if _crowd(problem, routes) is not None:
        return f"a node holds too much: {_crowd(problem, routes)}"
    if _meeting(routes) is not None:
        return f"two passes at one time: {_meeting(routes)}"
    return ""
