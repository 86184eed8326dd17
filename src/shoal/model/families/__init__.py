"""One file per family: how its Hugging Face configuration and tensor names correspond to ours.

Every part here offers

- ``to_huggingface(config) -> dict``: the contents of ``config.json``;
- ``from_huggingface(raw, where) -> ModelConfig``: the other way;
- ``names(config) -> {own name: pieces}``: which stored tensors, one below the other,
  make up each of our parameters.
"""
