"""parallel.vocab: embedding and output layer split by vocabulary."""
