// Recurrences in fp64.
#include "recurrence.h"

FUNCTIONS(double, double, fp64)
POINTS(Lstm, lstm, double, fp64)
POINTS(Gru, gru, double, fp64)
POINTS(Elman, elman, double, fp64)
POINTS(Slstm, slstm, double, fp64)
