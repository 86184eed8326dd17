"""Dispatch that does not look at estimates, for tests of what kernels in C++ do."""

from __future__ import annotations

from shoal.kernel import dispatch


def cpp_first(*preferred):
    """What stands for ``dispatch._remembered``: kernels in C++ wherever they can compute a call.

    Left to estimates, the choice depends on the machine: the library's product is estimated to be
    the fastest of small matrices from some number of rows on, and from which on follows from what
    a saved probe measured, if there is one.

    Args:
        preferred: backends that go before ``cpp``, such as ``amx``.
    """
    choose = dispatch._remembered

    def chosen(call, wanted, exact):
        kernels = dispatch.kernels_of(call.op)
        for backend in (*preferred, "cpp"):
            if wanted is None and backend in kernels and kernels[backend].refuses(call) is None:
                wanted = backend
        return choose(call, wanted, exact)

    return chosen
