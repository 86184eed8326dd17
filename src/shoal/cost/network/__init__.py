"""network: what flows over a fabric take. Torch-free.

``fabric`` says what switches and links there are, ``flows`` what is sent and over which paths,
``fair`` shares links among flows, ``simulate`` lets time pass, and ``collectives`` turns
collectives into phases of flows.
"""

__all__: list[str] = []
