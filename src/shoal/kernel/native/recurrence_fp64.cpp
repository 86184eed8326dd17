// Recurrences in fp64.
#include "recurrence.h"

FUNCTIONS(double, fp64)
