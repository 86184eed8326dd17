"""decode: how a served model turns scores into text."""
