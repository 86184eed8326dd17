"""lab: techniques and tools that no job reaches yet, only the experiments of claims.

A module stays here until a job, a verb or a study uses it; then it moves to the room that owns
it. Nothing outside the claims imports from here (``tests/contracts/test_reachability.py``).
"""
