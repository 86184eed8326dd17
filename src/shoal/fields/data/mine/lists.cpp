// Python's lists (or tuples) of whole numbers, written one after the other.
//
// Functions of Python's stable interface, declared here so that no header is needed. Called with
// the interpreter's lock held.

#include <cstddef>
#include <cstdint>

extern "C" {
std::ptrdiff_t PyList_Size(void*);
void* PyList_GetItem(void*, std::ptrdiff_t);
std::ptrdiff_t PyTuple_Size(void*);
void* PyTuple_GetItem(void*, std::ptrdiff_t);
long long PyLong_AsLongLong(void*);
void* PyErr_Occurred();
void PyErr_Clear();

// begins[i + 1]: where row i ends; the rows are all lists, or all tuples.
int64_t measure_rows(void* rows, int32_t tuples, int64_t* begins) {
    const std::ptrdiff_t count = PyList_Size(rows);
    begins[0] = 0;
    for (std::ptrdiff_t at = 0; at < count; ++at) {
        void* row = PyList_GetItem(rows, at);
        begins[at + 1] = begins[at] + (tuples ? PyTuple_Size(row) : PyList_Size(row));
    }
    return begins[count];
}

// Numbers of all rows. 0 if one is no whole number of 64 bits.
int32_t flatten_rows(void* rows, int32_t tuples, const int64_t* begins, int64_t* to) {
    const std::ptrdiff_t count = PyList_Size(rows);
    for (std::ptrdiff_t at = 0; at < count; ++at) {
        void* row = PyList_GetItem(rows, at);
        const std::ptrdiff_t length = begins[at + 1] - begins[at];
        for (std::ptrdiff_t k = 0; k < length; ++k) {
            void* item = tuples ? PyTuple_GetItem(row, k) : PyList_GetItem(row, k);
            const int64_t number = PyLong_AsLongLong(item);
            if (number == -1 && PyErr_Occurred()) {
                PyErr_Clear();
                return 0;
            }
            *to++ = number;
        }
    }
    return 1;
}
}
