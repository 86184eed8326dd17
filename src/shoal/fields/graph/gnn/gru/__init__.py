"""gru: neighbours folded one after the other by a recurrent cell."""
