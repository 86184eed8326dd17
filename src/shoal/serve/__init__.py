"""serve: answering requests with a trained model.

The door. ``engine`` is the loop of plan, execute and commit; ``runner`` computes; ``process``
keeps the engine in a process of its own; ``api`` speaks HTTP.
"""
