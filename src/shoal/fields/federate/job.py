"""The values of a federated training job: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from shoal.core.config import Kind
from shoal.core.errors import ConfigError
from shoal.core.parts import Choice
from shoal.fields.federate.clients import parse_clients
from shoal.fields.federate.wire.keys import is_loopback, parse_address
from shoal.ir import Job, Plan, Report


class FederateJob(Job):
    """Train one model on the data of many clients, which stays where it is.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: what clients learn from, and the server tests on.
        partition: which client has which examples.
        learner: the model that they train.
        clients: how many and what they are: ``5``, ``10xLaptop@20Mbit``, ``4@100Mbit+1@5Mbit``.
        speeds: how much slower than this each client computes: ``equal``, ``normal`` or
            ``exponential``, with the slowest at ``slowest``; or a factor for each client.
        slowest: factor of the slowest client of a drawn distribution.
        algorithm: who works when; None lets the planner choose.
        server: how the combined update moves the model.
        robust: how updates become one.
        privacy: what the model may reveal of a client; None promises nothing.
        secure: the server learns sums of updates only (secure aggregation).
        compressor: how clients compress their updates.
        attack: what malicious clients send, to test a rule; None for no attack.
        attackers: how many clients are malicious, the first ones.
        steps: local optimizer steps of a job.
        batch: examples of a step.
        lr: learning rate of the clients.
        momentum: of the clients.
        prox: weight of the distance from the received model (FedProx).
        rounds: length of the run: local steps of all clients in so many rounds.
        target: accuracy at which the run ends; None to make all rounds.
        budget_s: seconds after which it ends in any case; None for no limit.
        plane: who receives the bodies of updates, and who sums them, on the wall clock.
        pool: where clients compute on the virtual clock; None for this process.
        listen: address of the server. One that other machines reach needs ``keys``.
        keys: YAML file of lines ``NAME: KEY``, for clients that join from elsewhere; without it
            clients are processes of this machine.
        certfile: certificate for TLS, PEM; empty for plain HTTP.
        keyfile: its key, PEM.
        clock: ``wall``: processes that talk over sockets; ``virtual``: one process in which time is
            computed.
        hosts: processes of a run on the wall clock; clients are dealt to them. 0 for one each, up
            to 16.
        restarts: how often a process of clients that dies is started again.
        pilot: learn on a virtual clock while planning, to predict the time to the target.
        seed: random seed.
    """

    job: Literal["federate"] = "federate"
    name: str = Field(default="federate", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: Annotated[Choice, Kind("example_source")] = Choice(name="digits")
    partition: Annotated[Choice, Kind("partitioner")] = Choice(name="iid")
    learner: Annotated[Choice, Kind("learner")] = Choice(name="cnn_digits")
    clients: str = "5"
    speeds: Literal["equal", "normal", "exponential"] | tuple[PositiveFloat, ...] = "equal"
    slowest: Annotated[float, Field(ge=1)] = 6.0
    algorithm: Annotated[Choice, Kind("client_scheduler")] | None = None
    server: Annotated[Choice, Kind("server_optimizer")] = Choice(name="sgd")
    robust: Annotated[Choice, Kind("robust_rule")] = Choice(name="mean")
    privacy: Annotated[Choice, Kind("privacy")] | None = None
    secure: bool = False
    compressor: Annotated[Choice, Kind("update_compressor")] = Choice(name="identity")
    attack: Annotated[Choice, Kind("attack")] | None = None
    attackers: NonNegativeInt = 0
    steps: PositiveInt = 20
    batch: PositiveInt = 32
    lr: PositiveFloat = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    prox: NonNegativeFloat = 0.0
    rounds: PositiveInt = 20
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    budget_s: PositiveFloat | None = None
    plane: Annotated[Choice, Kind("aggregation_plane")] = Choice(name="direct")
    pool: Annotated[Choice, Kind("pool")] | None = None
    listen: str = "127.0.0.1:0"
    keys: str = ""
    certfile: str = ""
    keyfile: str = ""
    clock: Literal["wall", "virtual"] = "wall"
    hosts: NonNegativeInt = 0
    restarts: NonNegativeInt = 3
    pilot: bool = False
    seed: NonNegativeInt = 0

    @model_validator(mode="before")
    @classmethod
    def _number(cls, values: object) -> object:
        """A bare number of clients is one."""
        if isinstance(values, dict) and isinstance(values.get("clients"), int):
            return {**values, "clients": str(values["clients"])}
        return values

    @model_validator(mode="after")
    def _clients_fit(self) -> FederateJob:
        count = len(parse_clients(self.clients))
        if not isinstance(self.speeds, str) and len(self.speeds) != count:
            raise ConfigError(
                f"speeds: {len(self.speeds)} factors for {count} clients; give one each, or equal, "
                "normal or exponential"
            )
        host, _ = parse_address(self.listen)
        if not is_loopback(host) and not self.keys:
            raise ConfigError(
                f"listen: other machines reach {self.listen}, and there are no keys; give keys, a "
                "YAML file of lines NAME: KEY, or listen to 127.0.0.1:0"
            )
        if bool(self.certfile) != bool(self.keyfile):
            raise ConfigError("certfile, keyfile: TLS needs both, PEM files; give both or neither")
        if self.keys and self.clock == "virtual":
            raise ConfigError("keys: no client joins on the virtual clock; give clock: wall")
        if self.pool is not None and self.clock == "wall":
            raise ConfigError("pool: clients are processes on the wall clock; give clock: virtual")
        if (self.attack is None) != (self.attackers == 0) or self.attackers >= count:
            raise ConfigError(
                f"attackers: {self.attackers} of {count} clients with attack = {self.attack}; give "
                "an attack and fewer attackers than clients, or neither"
            )
        return self


class FederatePlan(Plan[FederateJob]):
    """A federation's plan: its job has an algorithm.

    Args:
        parameters: of the model.
        samples: examples of each client.
    """

    parameters: int
    samples: tuple[int, ...]


class FederateReport(Report[FederatePlan]):
    """A federation's report; its details have the curve, the clients and the rounds."""
