"""Experts on ranks of their own: tokens travel to them and back."""
