"""cost.pipeline: schedules of pipelines simulated, and drawn."""
