"""rnn: recurrences with gradients, and recurrent blocks in place of attention."""
