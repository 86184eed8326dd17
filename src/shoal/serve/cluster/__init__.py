"""serve.cluster: several engines as one server: replicas, phases, lent memory."""
