"""plan.balance.replicas: which replica answers a request."""
