"""fused: what lies between the products of a decoder, each in one pass over memory.

A backend a file, with all four operators: ``rms_norm``, ``rope``, ``swiglu``, ``sample``.
"""
