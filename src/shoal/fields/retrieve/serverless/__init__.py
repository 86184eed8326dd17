"""serverless: an index searched by short-lived functions that start each other as a tree.

Start reading at ``protocols.py``, then ``functions.py`` and ``gateway.py``.
:class:`FunctionSearch` is the coordinator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import PartTable, lazy_names

if TYPE_CHECKING:
    from shoal.fields.retrieve.serverless.gateway import FunctionGateway
    from shoal.fields.retrieve.serverless.search import FunctionSearch

__all__ = ["FUNCTION_BACKENDS", "FunctionGateway", "FunctionSearch"]

FUNCTION_BACKENDS = PartTable(
    "function_backend",
    {
        "in_process": "shoal.fields.retrieve.serverless.in_process:InProcess",
        "processes": "shoal.fields.retrieve.serverless.processes:FunctionProcesses",
        "http": "shoal.fields.retrieve.serverless.http_workers:HttpWorkers",
        "ray": "shoal.fields.retrieve.serverless.on_ray:RayFunctions",
    },
    about=(
        "Where the functions of a search run. Chosen by the key `backend` of a job with "
        "`job: search_functions`, and by `backend` of `FunctionGateway`."
    ),
    protocol="shoal.fields.retrieve.serverless.protocols:FunctionBackend",
)

__getattr__ = lazy_names(__name__, FunctionSearch="search", FunctionGateway="gateway")
