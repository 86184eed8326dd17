"""serve.decode.heads: guesses by what was trained onto the target itself."""
