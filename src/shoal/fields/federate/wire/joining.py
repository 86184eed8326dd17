"""A client that joins a federation from elsewhere, with data of its own."""

from __future__ import annotations

import ssl
import threading

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.learn.protocols import Examples, Learning
from shoal.fields.federate.protocols import FederationError
from shoal.fields.federate.wire.client import ClientSetting, RemoteClient, work


def join(
    url: str,
    *,
    name: str,
    key: str,
    x: np.ndarray,
    y: np.ndarray,
    learner: Choice,
    cafile: str = "",
) -> None:
    """Learn with others until the federation ends; see :func:`shoal.fields.federate.join`."""
    examples = np.ascontiguousarray(x), np.ascontiguousarray(y)
    if not len(x) or len(x) != len(y):
        raise FederationError(f"examples: {len(x)} of x and {len(y)} of y; give as many, and some")
    if not url.startswith(("http://", "https://")):
        raise FederationError(f"url: {url!r}; expected https://HOST:PORT")
    try:
        tls = ssl.create_default_context(cafile=cafile) if cafile else True
    except (OSError, ssl.SSLError) as cause:
        raise FederationError(f"cafile: {cafile} has no certificates ({cause})") from cause
    setting = ClientSetting(name=name, key=key, rows=[])
    client = RemoteClient(url, setting, len(x), tls)
    try:
        described = dict(client.join())
        if not described:
            raise FederationError(f"{url}: the federation is over")
        features, classes = tuple(described.pop("features")), int(described.pop("classes"))
        job = FederateJob.model_validate(described)
        # The name of a learner may stand for any code, so it is not the server that chooses it.
        if job.learner != learner:
            raise FederationError(f"learner: the federation trains {job.learner}, not {learner}")
        if x.shape[1:] != features or not 0 <= y.min() <= y.max() < classes:
            raise FederationError(
                f"examples: {list(x.shape)} with labels {y.min()} to {y.max()}; the federation "
                f"learns from examples of {list(features)} with labels 0 to {classes - 1}"
            )
        learning: Learning = table("learner").build(job.learner).build(features, classes)
        mine = Examples(
            x=examples[0].astype(np.float32) if x.dtype.kind == "f" else examples[0],
            y=examples[1].astype(np.int64),
            classes=classes,
        )
        work(client, setting, learning, {name: mine}, job, Exchange(job, (name,)), threading.Lock())
    finally:
        client.close()
