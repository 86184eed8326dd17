"""plan: decisions. Which split, which micro-batch, how many steps. Torch-free.

``strategy`` holds the planners of training jobs, ``length`` turns tokens and minutes into
steps, ``table`` puts plans into rows for people.
"""
