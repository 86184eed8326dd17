"""serve.engine: the loop of plan, execute and commit, its process, and the client that feeds it."""
