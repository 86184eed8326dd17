"""check: does a user's parallel training step equal one process?

``shoal check FILE`` runs the file's training step in one process and, over gloo, on several
ranks, and compares loss, every gradient, the updated parameters and the buffers. Start
reading at ``protocols.py``, then ``run.py``; ``diagnose.py`` says what a difference means.
"""
