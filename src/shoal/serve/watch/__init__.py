"""watch: a running server seen from outside: its health, its metrics, and a chat with it."""
