"""sample: neighbours drawn layer by layer, and batches whose features are gathered ahead."""
