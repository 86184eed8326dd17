// What follows the products of a symmetric gated recurrent unit, forward and backward.
//
// Source: Ong and Velickovic, Learnable Commutative Monoids for Graph Neural Networks, 2022.
//
// Of m pairs of vectors of d numbers, in float32. Products of a vector are 6 d numbers: three gates
// of it as an input, then as a state. A vector of a pair is the state of one order, and the other
// its input.

#include <cstdint>
#include <cstring>

namespace {

// Numbers from which on threads share the pairs.
constexpr int64_t kShared = 1 << 15;

// exp(x) to 2 units in the last place, between numbers that float32 can hold; NaN stays NaN. Written
// out, since compilers make vectors of a library's only where infinities may be wrong.
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    // Added to it, a number is rounded to the nearest whole one, which its lowest bits then are.
    constexpr float kRound = 12582912.0f;
    const float shifted = x * 1.44269504f + kRound;
    const float whole = shifted - kRound;
    const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 0.5f;
    uint32_t power;
    std::memcpy(&power, &shifted, sizeof power);
    power = (power + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, sizeof scale);
    return (sum * r * r + r + 1.0f) * scale;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Exact to 1e-7 of 1.
inline float tanh_of(float x) { return 1.0f - 2.0f / (1.0f + exponential(2.0f * x)); }

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
