"""wire: a federation over HTTP: the server, the processes of clients, the format of messages."""
