"""serve.decode.dovetail: the drafter on a weak accelerator, the target on the host."""
