"""A process that evaluates the operator of one worker and talks to the server.

It is given, as JSON: ``problem``, ``method``, ``compressor``, ``server_compressor``, ``workers``,
``seed``, ``step`` and ``bytes_per_s``, the rate of its link, for whose bytes it waits.
"""

from __future__ import annotations

import time

from shoal.fields.federate.vi.ends import Sender, received
from shoal.fields.federate.vi.setting import built
from shoal.fields.federate.wire.star import connect, frame


def main() -> None:
    """Work until the server ends the connection."""
    spoke = connect()
    given, worker = spoke.setting, spoke.number
    setting, rate = built(given), given["bytes_per_s"]
    steps = setting.method.steps(setting.place(worker, given["step"]))
    sender = Sender(setting.seed, worker)
    exchange, number = next(steps), 0
    while True:
        number += 1
        if exchange.members is None or worker in exchange.members:
            tensors = sender.encode(
                number, exchange.vector, exchange.up, feedback=exchange.feedback
            )
            message = frame(tensors, {})
            _wait(len(message), rate)
            spoke.send(message)
        answer = spoke.receive()
        assert answer is not None
        mean = received(setting.seed, number, exchange, answer[0], setting.operator.size)
        _wait(sum(one.nbytes for one in answer[0].values()), rate)
        exchange = steps.send(mean)


def _wait(nbytes: int, rate: float) -> None:
    if rate:
        time.sleep(nbytes / rate)


if __name__ == "__main__":
    main()
