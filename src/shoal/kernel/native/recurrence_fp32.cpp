// Recurrences in fp32.
#include "recurrence.h"

FUNCTIONS(float, float, fp32)
POINTS(Lstm, lstm, float, fp32)
POINTS(Gru, gru, float, fp32)
POINTS(Elman, elman, float, fp32)
POINTS(Slstm, slstm, float, fp32)
