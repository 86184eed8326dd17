"""lifl: updates in shared memory, summed by short-lived processes that are sent their keys.

Source: Qi et al., LIFL: A Lightweight, Event-driven Serverless Platform for Federated Learning,
2024.
"""
