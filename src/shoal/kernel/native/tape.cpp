// A list of calls, one after another, without going back to the interpreter between them.
//
// Whoever wrote the list down knows what each function takes. By the calling convention of 64-bit
// Linux whole numbers and floats go to registers of their own, in order, and whole numbers beyond
// them to the stack: a function may be given more of each than it takes.
#include <cstdint>

namespace {

constexpr int kWords = 16, kFloats = 4;

struct Call {
  void* function;
  int64_t words[kWords];
  float floats[kFloats];
  int64_t checked;  // a result of 0 or more says what is wrong
};

using Function = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                             int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                             float, float, float, float);

}  // namespace

// The number of the call that found something wrong, where it stopped; -1 where none did.
extern "C" int64_t tape_play(const Call* calls, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t* w = calls[i].words;
    const float* f = calls[i].floats;
    const int64_t found = reinterpret_cast<Function>(calls[i].function)(
        w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13],
        w[14], w[15], f[0], f[1], f[2], f[3]);
    if (calls[i].checked && found >= 0) return i;
  }
  return -1;
}
