// Recurrences in fp32 whose recurrent matrices are kept in bf16.
#include "recurrence.h"

FUNCTIONS(float, Bf16, bf16)
