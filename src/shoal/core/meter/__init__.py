"""meter: what a run says about itself while it runs.

One :class:`Meter` takes events, counters and gauges and hands them to sinks, which are
the parts of this room: JSON lines (the record every run keeps), Prometheus, TensorBoard,
Weights & Biases and MLflow.
"""

from shoal.core.meter.events import EventTail, read_events
from shoal.core.meter.meter import Meter
from shoal.core.meter.protocols import Sink, SinkWriter
from shoal.core.parts import PartTable

__all__ = ["SINKS", "EventTail", "Meter", "Sink", "SinkWriter", "read_events"]

SINKS = PartTable(
    "sink",
    {
        "jsonl": "shoal.core.meter.jsonl:JsonlSink",
        "mlflow": "shoal.core.meter.mlflow:Mlflow",
        "prometheus": "shoal.core.meter.prometheus:Prometheus",
        "tensorboard": "shoal.core.meter.tensorboard:TensorBoard",
        "wandb": "shoal.core.meter.wandb:WeightsAndBiases",
    },
    about=(
        "Where the events and metrics of a run are sent. Every run writes its own `events.jsonl`; "
        "the key "
        "`sinks` of a job adds others."
    ),
    protocol="shoal.core.meter.protocols:Sink",
)
