// Attention of query tokens over contexts made of blocks, each with positions of its own.
//
// The keys of a block are rotated as if its first token stood at position 0; a query is turned once
// for each block that it sees. Rows that see blocks in common go through them together. Pieces of
// short blocks share a step of 64 tokens: each is scored by the queries as they are turned for its
// block, and all of a row's scores are one softmax.
//
// A row's numbers are summed in the order of its tile's blocks, in steps that threads do not cut.
//
// Source: Rodionov et al., Hogwild! Inference, 2025, section 3.
#include "paged.h"

#ifdef __AVX512DQ__

namespace {

struct Views {
  const int64_t *block, *seen, *back;  // of each pair: how far the query stands behind its block
  const int64_t* parts;                // [N, most], pairs of each row, -1 for none
  int64_t pairs, most, blocks, slots, places;
  const float *cos, *sin;  // [places, d / 2]
};

// Rows that go through the same blocks together.
struct Together {
  int64_t first, rows;
  std::vector<int64_t> blocks, pair;  // pair [blocks, rows], -1 where a row does not see a block

  int64_t longest(const Views& v, int64_t b) const {
    int64_t most = 0;
    for (int64_t row = 0; row < rows; row++) {
      const int64_t i = pair[b * rows + row];
      if (i >= 0) most = std::max(most, v.seen[i]);
    }
    return most;
  }
};

// A step and the pieces of blocks that it is made of, each from a multiple of 16 on.
struct Mixed : Step {
  struct Piece {
    int64_t block, first, at, n;  // tokens [first, first + n) of a block, from `at` on
  } pieces[kStep / 16];
  int64_t num;
};

// The tokens of a tile's blocks, step by step.
struct Walk {
  const Problem& p;
  const Views& v;
  const Together& tile;
  int64_t block = 0, token = 0;

  bool next(Mixed& s) {
    s.n = s.num = 0;
    for (int64_t at = 0; at < kStep && block < int64_t(tile.blocks.size());) {
      const int64_t longest = tile.longest(v, block), n = std::min(kStep - at, longest - token);
      const int32_t* slots = (const int32_t*)p.table + tile.blocks[block] * p.width + token;
      for (int64_t t = 0; t < n; t++) s.slot[at + t] = slots[t];
      s.pieces[s.num++] = {block, token, at, n};
      s.n = at + n;
      at = std::min(kStep, (s.n + 15) / 16 * 16);
      for (int64_t t = s.n; t < at; t++) s.slot[t] = slots[0];
      token += n;
      if (token == longest) block++, token = 0;
    }
    if (!s.n) return false;
    for (int64_t t = (s.n + 15) / 16 * 16; t < kStep; t++) s.slot[t] = s.slot[0];
    for (int64_t t = 0; t < kStep; t++) {
      s.k[t] = p.k.codes + s.slot[t] * p.k.slot;
      s.v[t] = p.v.codes + s.slot[t] * p.v.slot;
    }
    return true;
  }

  // Which tokens of a step a row sees, a bit each.
  uint64_t visible(const Mixed& s, int64_t row) const {
    uint64_t bits = 0;
    for (int64_t i = 0; i < s.num; i++) {
      const Mixed::Piece& piece = s.pieces[i];
      const int64_t pair = tile.pair[piece.block * tile.rows + row];
      const int64_t n = pair < 0 ? 0 : std::min(piece.n, v.seen[pair] - piece.first);
      if (n > 0) bits |= (n == 64 ? ~0ull : (1ull << n) - 1) << piece.at;
    }
    return bits;
  }
};

inline __m512 load(const float* at, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, at); }
inline void save(float* at, __mmask16 mask, __m512 x) { _mm512_mask_storeu_ps(at, mask, x); }
#ifdef __AVX512BF16__
inline __m512 load(const uint16_t* at, __mmask16 mask) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void save(uint16_t* at, __mmask16 mask, __m512 x) {
  _mm256_mask_storeu_epi16(at, mask, (__m256i)_mm512_cvtneps_pbh(x));
}
#endif

// One head of a query, turned on by so many places.
template <class T>
void turn(const Problem& p, const Views& v, const T* from, int64_t place, T* to) {
  const int64_t half = p.d / 2;
  const float *cos = v.cos + place * half, *sin = v.sin + place * half;
  for (int64_t i = 0; i < half; i += 16) {
    const __mmask16 mask = low16(half - i);
    const __m512 a = load(from + i, mask), b = load(from + half + i, mask);
    const __m512 c = load(cos + i, mask), s = load(sin + i, mask);
    save(to + i, mask, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    save(to + half + i, mask, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
}

// Key/value heads [first, last) of a tile.
template <class F, class T>
void attend(const Problem& p, const Views& v, const Together& tile, int64_t first, int64_t last,
            Buffer& buffer) {
  const int64_t M = tile.rows * p.group, heads = last - first, record = kHead + p.pad;
  const int64_t q_bytes = F::query_bytes(p), blocks = tile.blocks.size();
  const int64_t turned = blocks * heads * M * q_bytes;
  float* records = (float*)buffer.get(heads * M * record * 4 + M * (kStep * 8 + 8) + turned + 320);
  float* scored = records + heads * M * record;
  typename F::P* weights = (typename F::P*)(scored + M * kStep);
  float* worth = (float*)(scored + 2 * M * kStep);
  char* q = (char*)(((uintptr_t)(worth + M) + 63) / 64 * 64);
  std::memset(records, 0, heads * M * record * 4);
  for (int64_t i = 0; i < heads * M; i++) records[i * record] = kNone;
  std::memset(q, 0, turned);
  const auto at = [&](int64_t b, int64_t g) { return q + (b * heads + g - first) * M * q_bytes; };
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t row = 0; row < tile.rows; row++) {
      const int64_t pair = tile.pair[b * tile.rows + row];
      if (pair < 0) continue;
      const char* from = p.q + (tile.first + row) * p.q_row;
      for (int64_t g = first; g < last; g++)
        for (int64_t j = 0; j < p.group; j++) {
          const char* head = from + (g * p.group + j) * p.q_head;
          char* to = at(b, g) + (row * p.group + j) * q_bytes;
          if (v.back[pair])
            turn(p, v, (const T*)head, v.back[pair], (T*)to);
          else
            std::memcpy(to, head, p.d * sizeof(T));
        }
    }
  Walk walk{p, v, tile};
  Mixed steps[2];
  uint64_t bits[kVectors];
  bool more = walk.next(steps[0]);
  for (int64_t now = 0; more; now = 1 - now) {
    const Mixed& here = steps[now];
    more = walk.next(steps[1 - now]);
    const Mixed& next = more ? steps[1 - now] : here;
    for (int64_t row = 0; row < tile.rows; row++) bits[row] = walk.visible(here, row);
    for (int64_t g = first; g < last; g++) {
      float* mine = records + (g - first) * M * record;
      for (int64_t i = 0; i < here.num; i++) {
        const Mixed::Piece& piece = here.pieces[i];
        scores<F>(p, here, next, piece.at, piece.at + piece.n, g, M, at(piece.block, g), q_bytes,
                  scored);
      }
      for (int64_t m = 0; m < M; m++)
        worth[m] = weigh<typename F::P>(scored + m * kStep, bits[m / p.group], nullptr,
                                        weights + m * kStep, mine + m * record);
      F::values(p, here, next, g, M, weights, mine + kHead, record, worth, nullptr);
    }
  }
  for (int64_t g = first; g < last; g++)
    for (int64_t row = 0; row < tile.rows; row++)
      for (int64_t j = 0; j < p.group; j++, records += record)
        F::result(p, records + kHead, records[1],
                  p.out + ((tile.first + row) * p.heads + g * p.group + j) * p.result_bytes());
}

// Rows side by side whose first blocks are the same: workers of one request, tokens of a prompt.
std::vector<Together> tiles_of(const Problem& p, const Views& v) {
  const int64_t most = std::max<int64_t>(1, kVectors / p.group);
  std::vector<Together> tiles;
  for (int64_t row = 0; row < p.rows; row++) {
    const int64_t block = v.block[v.parts[row * v.most]];
    if (tiles.empty() || tiles.back().rows == most || tiles.back().blocks[0] != block)
      tiles.push_back({row, 0, {block}, {}});
    tiles.back().rows++;
    for (int64_t m = 1; m < v.most; m++) {
      const int64_t pair = v.parts[row * v.most + m];
      if (pair < 0) continue;
      std::vector<int64_t>& known = tiles.back().blocks;
      if (std::find(known.begin(), known.end(), v.block[pair]) == known.end())
        known.push_back(v.block[pair]);
    }
  }
  for (Together& tile : tiles) {
    tile.pair.assign(tile.blocks.size() * tile.rows, -1);
    for (int64_t row = 0; row < tile.rows; row++)
      for (int64_t m = 0; m < v.most; m++) {
        const int64_t pair = v.parts[(tile.first + row) * v.most + m];
        if (pair < 0) continue;
        const auto found = std::find(tile.blocks.begin(), tile.blocks.end(), v.block[pair]);
        tile.pair[(found - tile.blocks.begin()) * tile.rows + row] = pair;
      }
  }
  return tiles;
}

template <class F, class T>
void views(Problem& p, const Views& v) {
  p.pad = (p.d + F::width - 1) / F::width * F::width;
  const std::vector<Together> tiles = tiles_of(p, v);
  int64_t work = 0;
  for (const Together& tile : tiles) {
    int64_t tokens = 0;
    for (int64_t b = 0; b < int64_t(tile.blocks.size()); b++) tokens += tile.longest(v, b);
    work += tokens / kStep * p.kv_heads * (4 + tile.rows * p.group);
  }
  // A thread that has less than some tens of microseconds to do is not worth its waking.
  const int64_t threads = std::clamp<int64_t>(work / 32, 1, omp_get_max_threads());
  const int64_t cuts = std::min(threads, p.kv_heads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
  for (int64_t i = 0; i < int64_t(tiles.size()) * cuts; i++) {
    const int64_t cut = i % cuts;
    attend<F, T>(p, v, tiles[i / cuts], p.kv_heads * cut / cuts, p.kv_heads * (cut + 1) / cuts,
                 own);
  }
}

// What is wrong with the pairs: -1 nothing; else which, and the kind above it.
int64_t wrong(const Problem& p, const Views& v) {
  constexpr int64_t kKind = int64_t(1) << 40;
  for (int64_t row = 0; row < p.rows; row++) {
    if (v.parts[row * v.most] < 0) return 4 * kKind + row;
    for (int64_t m = 0; m < v.most; m++)
      if (v.parts[row * v.most + m] >= v.pairs) return 4 * kKind + row;
  }
  std::vector<int64_t> longest(v.blocks, 0);
  for (int64_t i = 0; i < v.pairs; i++) {
    if (v.block[i] < 0 || v.block[i] >= v.blocks) return 1 * kKind + i;
    if (v.seen[i] < 1 || v.seen[i] > p.width) return 2 * kKind + i;
    if (v.back[i] < 0 || v.back[i] >= v.places) return 3 * kKind + i;
    longest[v.block[i]] = std::max(longest[v.block[i]], v.seen[i]);
  }
  for (int64_t b = 0; b < v.blocks; b++)
    for (int64_t t = 0; t < longest[b]; t++) {
      const int32_t slot = ((const int32_t*)p.table)[b * p.width + t];
      if (slot < 0 || slot >= v.slots) return 5 * kKind + b * p.width + t;
    }
  return -1;
}

}  // namespace

// `a` in the order of `arguments` of the Python side.
extern "C" int64_t view_attention(const int64_t* a) {
  Problem p{};
  p.half = a[0] != 0;
  p.q = (const char*)a[1], p.out = (char*)a[2], p.q_row = a[3], p.q_head = a[4];
  p.k = {(const char*)a[5], nullptr, a[6], a[7], 0, 0};
  p.v = {(const char*)a[8], nullptr, a[9], a[10], 0, 0};
  p.table = (const void*)a[11];
  p.rows = a[12], p.heads = a[13], p.kv_heads = a[14], p.d = a[15], p.width = a[16];
  p.scale = float(1.4426950408889634 / std::sqrt(double(p.d)));
  p.group = p.heads / p.kv_heads;
  const int64_t* pairs = (const int64_t*)a[17];  // [4, P]: row, block, seen, back
  Views v{};
  v.pairs = a[18], v.block = pairs + v.pairs, v.seen = v.block + v.pairs, v.back = v.seen + v.pairs;
  v.parts = (const int64_t*)a[19], v.most = a[20], v.blocks = a[21], v.slots = a[22];
  v.cos = (const float*)a[23], v.sin = (const float*)a[24], v.places = a[25];
  const int64_t problem = wrong(p, v);
  if (problem >= 0 || p.rows == 0) return problem;
  if (!p.half) views<Fp32, float>(p, v);
#ifdef __AVX512BF16__
  if (p.half) views<Bf16, uint16_t>(p, v);
#endif
  return -1;
}

#endif
