// What follows the products of a symmetric gated recurrent unit, forward and backward.
//
// Source: Ong and Velickovic, Learnable Commutative Monoids for Graph Neural Networks, 2022.
//
// Of m pairs of vectors of d numbers, in float32. Products of a vector are 6 d numbers: three gates
// of it as an input, then as a state. A vector of a pair is the state of one order, and the other
// its input.

#include <cmath>
#include <cstdint>

namespace {

// Numbers from which on threads share the pairs.
constexpr int64_t kShared = 1 << 15;

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Exact to 1e-7 of 1, and made of what has a vector form everywhere.
inline float tanh_of(float x) { return 1.0f - 2.0f / (1.0f + std::exp(2.0f * x)); }

}  // namespace

extern "C" {

// Products [m, 2, 6 d] and pairs [m, 2, d] to gates [m, 2, 2 d], new states [m, 2, d], and the mean
// of both orders [m, d].
void lcm_forward(int64_t m, int64_t d, const float* products, const float* pairs, float* gates,
                 float* fresh, float* mean) {
#pragma omp parallel for if (m * d > kShared)
    for (int64_t p = 0; p < m; ++p) {
        float* to = mean + p * d;
        for (int64_t s = 0; s < 2; ++s) {
            const int64_t at = 2 * p + s;
            const float* own = products + at * 6 * d + 3 * d;
            const float* given = products + (2 * p + 1 - s) * 6 * d;
            const float* x = pairs + at * d;
            float *gate = gates + at * 2 * d, *state = fresh + at * d;
#pragma omp simd
            for (int64_t i = 0; i < 2 * d; ++i) gate[i] = sigmoid(given[i] + own[i]);
#pragma omp simd
            for (int64_t i = 0; i < d; ++i)
                state[i] = tanh_of(given[2 * d + i] + gate[i] * own[2 * d + i]);
#pragma omp simd
            for (int64_t i = 0; i < d; ++i) {
                const float half = 0.5f * (state[i] + gate[d + i] * (x[i] - state[i]));
                to[i] = s ? to[i] + half : half;
            }
        }
    }
}

// The gradient of the mean [m, d] to those of the products, and of the pairs as far as they were
// kept [m, 2, d].
void lcm_backward(int64_t m, int64_t d, const float* grad, const float* products,
                  const float* pairs, const float* gates, const float* fresh, float* of_products,
                  float* kept) {
#pragma omp parallel for if (m * d > kShared)
    for (int64_t p = 0; p < m; ++p)
        for (int64_t s = 0; s < 2; ++s) {
            const int64_t at = 2 * p + s;
            const float* own = products + at * 6 * d + 5 * d;
            const float *x = pairs + at * d, *reset = gates + at * 2 * d, *update = reset + d;
            const float *state = fresh + at * d, *from = grad + p * d;
            float* of_own = of_products + at * 6 * d + 3 * d;
            float* of_given = of_products + (2 * p + 1 - s) * 6 * d;
            float* stays = kept + at * d;
#pragma omp simd
            for (int64_t i = 0; i < d; ++i) {
                const float half = 0.5f * from[i], r = reset[i], u = update[i], n = state[i];
                stays[i] = half * u;
                const float of_new = (half - stays[i]) * (1.0f - n * n);
                const float of_reset = of_new * own[i] * (r - r * r);
                const float of_update = half * (x[i] - n) * (u - u * u);
                of_own[i] = of_given[i] = of_reset;
                of_own[d + i] = of_given[d + i] = of_update;
                of_given[2 * d + i] = of_new;
                of_own[2 * d + i] = of_new * r;
            }
        }
}
}
