"""Drafters at work in training: the learners, which need torch."""
