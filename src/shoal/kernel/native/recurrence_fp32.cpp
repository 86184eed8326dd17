// Recurrences in fp32, whose recurrent matrices may be kept in bf16.
#include "recurrence.h"

FUNCTIONS(float, fp32)
