// N-grams of words that benchmarks have too.

namespace {

// Calls `gram(hash)` for each n words in a row, words being runs of letters and digits. Letters of
// both cases have one hash, and some other characters share one too. It returns whether to go on.
template <class Gram>
void each_gram(const Marks<kAlnums>& marks, int64_t n, std::vector<uint64_t>& ring, Gram&& gram) {
    constexpr uint64_t kBase = 0xD1342543DE82EF95ull, kFold = 0x2020202020202020ull;
    uint64_t highest = 1, hash = 0;
    for (int64_t i = 0; i < n; ++i) highest *= kBase;
    ring.assign(size_t(n), 0);
    int64_t words = 0, slot = 0;
    bool on = true;
    each_run(marks.alnum, marks.blocks, [&](size_t from, size_t to) {
        if (!on) return;
        const uint64_t word = hashed(&marks.text[from], to - from, kFold);
        hash = hash * kBase + word - ring[slot] * highest;
        ring[slot] = word;
        if (++slot == n) slot = 0;
        if (++words >= n) on = gram(mix(hash) | 1);
    });
}

}  // namespace

extern "C" {

// Hashes of all n-grams of the documents, up to `most`; returns how many there are.
int64_t gram_hashes(const Byte* data, const int64_t* offsets, int64_t n, const Byte* classes,
                    int64_t size, int64_t most, uint64_t* out) {
    Marks<kAlnums> marks;
    std::vector<uint64_t> ring;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        marks.look_at(classes, view(data + offsets[i], data + offsets[i + 1]));
        each_gram(marks, size, ring, [&](uint64_t hash) {
            if (count < most) out[count] = hash;
            ++count;
            return true;
        });
    }
    return count;
}

// Which documents have an n-gram whose hash is in a table of 2^k places, 0 being none.
void contains(const Byte* data, const int64_t* offsets, int64_t n, const Byte* alive,
              const Byte* classes, int64_t size, const uint64_t* table, int64_t places,
              Byte* found) {
    Marks<kAlnums> marks;
    std::vector<uint64_t> ring;
    const uint64_t mask = uint64_t(places) - 1;
    for (int64_t i = 0; i < n; ++i) {
        if (!alive[i]) continue;
        marks.look_at(classes, view(data + offsets[i], data + offsets[i + 1]));
        each_gram(marks, size, ring, [&](uint64_t hash) {
            for (uint64_t at = hash >> 20 & mask; table[at]; at = (at + 1) & mask)
                if (table[at] == hash) found[i] = 1;
            return !found[i];
        });
    }
}
}
