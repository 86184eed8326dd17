"""serve.decode.falcon: a net over the target's features that guesses several tokens a pass."""
