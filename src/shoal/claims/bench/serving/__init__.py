"""serving: engines beside each other on one machine, one working at a time, in turns.

Every engine runs in a process, and if need be in an environment, of its own, and speaks the
lines of ``drivers/loop.py``. All read the same bytes of one model and get the same prompts as
token ids; they are greedy, and generate exactly as many tokens as they are asked for. While one
works, the processes of the others are stopped.

Start reading at ``run.py``; ``peers`` starts the engines, ``drivers`` is what they run.
"""
