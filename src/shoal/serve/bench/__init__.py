"""serve.bench: workloads replayed and measured, here or on another server."""
