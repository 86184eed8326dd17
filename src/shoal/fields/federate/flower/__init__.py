"""flower: a federation of Shoal as an app of Flower, which runs it in production.

``server_app(plan)`` and ``client_app(plan)`` make the two halves, ``strategy(plan)`` the strategy
alone; all of them import flwr when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.extras import import_extra
from shoal.core.parts import PartTable

if TYPE_CHECKING:
    from shoal.fields.federate.job import FederatePlan

__all__ = ["FEDERATION_EMITTERS", "client_app", "server_app", "strategy"]

FEDERATION_EMITTERS = PartTable(
    "federation_emitter",
    {"flower": "shoal.fields.federate.flower.emit:FlowerApp"},
    about="Writers of apps for other frameworks. Chosen by `shoal plan federate --emit`.",
    protocol="shoal.plan.emit.protocols:PlanEmitter",
)


def _flower() -> None:
    import_extra("flwr", extra="flower", purpose="a federation under Flower")


def strategy(plan: FederatePlan) -> Any:
    """A ``flwr.serverapp.strategy.Strategy`` that does what the plan says.

    Raises:
        MissingExtraError: flwr is not installed.
        ShoalError: the data cannot be read, or a part does not fit.
    """
    _flower()
    from shoal.fields.federate.flower.server import PlanStrategy

    return PlanStrategy(plan)


def server_app(plan: FederatePlan) -> Any:
    """A ``flwr.serverapp.ServerApp`` that runs the strategy and writes the model.

    Raises:
        MissingExtraError: flwr is not installed.
    """
    _flower()
    from shoal.fields.federate.flower.server import server_app as make

    return make(plan)


def client_app(plan: FederatePlan) -> Any:
    """A ``flwr.clientapp.ClientApp``: client N of the plan on the node with ``partition-id=N``.

    Raises:
        MissingExtraError: flwr is not installed.
    """
    _flower()
    from shoal.fields.federate.flower.clients import client_app as make

    return make(plan)
