"""Fine-tuning methods at work, on tensors."""
