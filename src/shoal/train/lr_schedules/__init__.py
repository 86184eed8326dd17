"""Courses of the learning rate."""
