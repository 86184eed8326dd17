"""serve.ranks: a model that several ranks share: what each computes, and who commands them."""
