"""Measurements on one GPU, predicted before they are made; ``scripts/gpu`` runs them."""
