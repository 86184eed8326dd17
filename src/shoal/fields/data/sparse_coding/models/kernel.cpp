// Combinations of causes held against points: sums and maxima of components, and Gaussian slabs.
//
// Source: Henniges et al., Binary Sparse Coding, 2010 (sums); Luecke, Eggert, Expectation Truncation, 2010 (maximal causes); Sheikh, Shelton, Luecke, A
// Truncated EM Approach for Spike-and-Slab Sparse Coding, 2014 (slabs).
//
// Arrays are in C order: data [n, D], candidates [n, C] of H components, combinations: sizes [K] and
// which [K, most] among the candidates of a point, posteriors [n, K].

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

// States this unlikely change no sum by more than rounding does.
constexpr double kUnlikely = 1e-16;
constexpr double kTiny = 1e-300;
constexpr int kMost = 16;  // causes of a combination
constexpr int kFew = 48;   // components that are compared each with each

template <bool magnitude>
inline double larger(double a, double b) {
    if (magnitude) return std::fabs(b) > std::fabs(a) ? b : a;
    return b > a ? b : a;
}

template <bool magnitude>
double error_of(const double* y, const double* const* rows, int size, int64_t D, double* best) {
    double sum = 0;
    if (size == 2) {
        const double *a = rows[0], *b = rows[1];
        for (int64_t d = 0; d < D; ++d) {
            const double gap = y[d] - larger<magnitude>(a[d], b[d]);
            sum += gap * gap;
        }
        return sum;
    }
    if (size == 3) {
        const double *a = rows[0], *b = rows[1], *c = rows[2];
        for (int64_t d = 0; d < D; ++d) {
            const double gap = y[d] - larger<magnitude>(larger<magnitude>(a[d], b[d]), c[d]);
            sum += gap * gap;
        }
        return sum;
    }
    std::memcpy(best, rows[0], sizeof(double) * D);
    for (int i = 1; i < size; ++i)
        for (int64_t d = 0; d < D; ++d) best[d] = larger<magnitude>(best[d], rows[i][d]);
    for (int64_t d = 0; d < D; ++d) sum += (y[d] - best[d]) * (y[d] - best[d]);
    return sum;
}

// Lower factor of a symmetric positive matrix [size, size] in place; log of its determinant.
inline double factor(double* a, int size) {
    double logs = 0;
    for (int i = 0; i < size; ++i) {
        for (int j = 0; j <= i; ++j) {
            double sum = a[i * size + j];
            for (int k = 0; k < j; ++k) sum -= a[i * size + k] * a[j * size + k];
            if (i == j) {
                if (sum < kTiny) sum = kTiny;
                a[i * size + i] = std::sqrt(sum);
                logs += std::log(sum);
            } else {
                a[i * size + j] = sum / a[j * size + j];
            }
        }
    }
    return logs;
}

// Inverse of the matrix of which `lower` is the factor.
inline void inverse(const double* lower, int size, double* out) {
    double half[kMost * kMost];  // inverse of the factor
    for (int j = 0; j < size; ++j) {
        for (int i = 0; i < j; ++i) half[i * size + j] = 0;
        half[j * size + j] = 1 / lower[j * size + j];
        for (int i = j + 1; i < size; ++i) {
            double sum = 0;
            for (int k = j; k < i; ++k) sum -= lower[i * size + k] * half[k * size + j];
            half[i * size + j] = sum / lower[i * size + i];
        }
    }
    for (int i = 0; i < size; ++i)
        for (int j = 0; j <= i; ++j) {
            double sum = 0;
            for (int k = i; k < size; ++k) sum += half[k * size + i] * half[k * size + j];
            out[i * size + j] = out[j * size + i] = sum;
        }
}

struct Slab {
    const double *gram, *mu, *psi;
    int64_t H;
    double left[kMost], precision[kMost * kMost];
    double logs;  // log determinants of covariance and of precision
    double shared;

    // Precision of the slabs of some causes given a point, factored, and what their mean leaves.
    void at(const double* p, const int64_t* chosen, int size) {
        double cov[kMost * kMost];
        for (int i = 0; i < size; ++i)
            for (int j = 0; j < size; ++j) cov[i * size + j] = psi[chosen[i] * H + chosen[j]];
        logs = factor(cov, size);
        inverse(cov, size, precision);
        shared = 0;
        for (int i = 0; i < size; ++i) {
            const double* row = gram + chosen[i] * H;
            double sum = p[chosen[i]];
            for (int j = 0; j < size; ++j) {
                precision[i * size + j] += row[chosen[j]];
                sum -= row[chosen[j]] * mu[chosen[j]];
            }
            left[i] = sum;
            shared += mu[chosen[i]] * (p[chosen[i]] + sum);
        }
        logs += factor(precision, size);
    }
};

inline void chosen_of(const int64_t* mine, const int32_t* which, int size, int64_t* chosen) {
    for (int i = 0; i < size; ++i) chosen[i] = mine[which[i]];
}

// Numbers of as many points, or states, as are worked on together.
constexpr int kLanes = 8;
typedef double Lanes __attribute__((vector_size(8 * kLanes)));
typedef int64_t Bits __attribute__((vector_size(8 * kLanes)));

// Numbers of a row from a place on; behind its end the lowest that there are.
inline Lanes load(const double* row, int64_t left) {
    Lanes result = Lanes{} + std::numeric_limits<double>::lowest();
    if (left >= kLanes)
        std::memcpy(&result, row, sizeof result);
    else
        std::memcpy(&result, row, sizeof(double) * left);
    return result;
}

inline void store(const Lanes& numbers, double* row, int64_t left) {
    if (left >= kLanes)
        std::memcpy(row, &numbers, sizeof numbers);
    else
        std::memcpy(row, &numbers, sizeof(double) * left);
}

inline Lanes larger(const Lanes& a, const Lanes& b) { return a < b ? b : a; }  // a if it is NaN

// e^x of numbers from -700 to 0, to the last bit but one.
inline Lanes exp_of(const Lanes& x) {
    const Bits k = __builtin_convertvector(x * 1.4426950408889634 - 0.5, Bits);
    const Lanes whole = __builtin_convertvector(k, Lanes);
    const Lanes r = (x - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
    Lanes sum = Lanes{} + 1.0 / 6227020800.0;
    for (const double one : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0,
                             120.0, 24.0, 6.0, 2.0, 1.0, 1.0})
        sum = sum * r + 1.0 / one;
    const Bits bits = (k + 1023) << 52;
    Lanes power;
    std::memcpy(&power, &bits, sizeof power);
    return sum * power;
}

inline double sum_of(const Lanes& numbers) {
    double sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += numbers[i];
    return sum;
}

inline int64_t pair_of(int64_t i, int64_t j) { return j * (j + 1) / 2 + i; }  // i <= j

}  // namespace

extern "C" {

void choose(int64_t n, int64_t H, int64_t C, const double* scores, int64_t* out) {
    std::vector<double> keys(H), order(H);
    std::vector<int64_t> larger(H), chosen(H + 1);
    const double lowest = -std::numeric_limits<double>::infinity();
    for (int64_t i = 0; i < n; ++i, scores += H, out += C) {
        for (int64_t h = 0; h < H; ++h) keys[h] = scores[h] == scores[h] ? scores[h] : lowest;
        double least = -lowest;  // of those that are chosen
        if (H <= kFew) {
            std::fill(larger.begin(), larger.end(), 0);
            for (int64_t h = 0; h < H; ++h)
                for (int64_t g = 0; g < H; ++g) larger[g] += keys[h] > keys[g];
            for (int64_t h = 0; h < H; ++h) least = larger[h] < C && keys[h] < least ? keys[h] : least;
        } else {
            order = keys;
            std::nth_element(order.begin(), order.begin() + (C - 1), order.end(), std::greater<>());
            least = order[C - 1];
        }
        int64_t equal = C, at = 0;  // how many that are as large as the least are chosen
        for (int64_t h = 0; h < H; ++h) equal -= keys[h] > least;
        for (int64_t h = 0; h < H; ++h) {
            const bool same = keys[h] == least;
            chosen[at] = h;
            at += (keys[h] > least) | (same & (equal > 0));
            equal -= same;
        }
        std::memcpy(out, chosen.data(), sizeof(int64_t) * C);
    }
}

// A combination is one of fewer causes, its parent, and a last cause; the error that it takes off is
// that of its parent, and what the last cause adds.
void sum_errors(int64_t n, int64_t H, int64_t C, int64_t K, int64_t most, int64_t m,
                const double* p, const double* gram, const double* values,
                const int64_t* candidates, const int32_t* sizes, const int32_t* which,
                const int32_t* worth, const int32_t* parents, double scale, const double* base,
                const double* log_prior, double* out) {
    const int64_t M = 1 + m * H + K, first = 1 + m * H;
    std::vector<Lanes> gains(m * C + K), pairs(C * (C + 1) / 2), near(C);
    for (int64_t start = 0; start < n; start += kLanes) {
        const int some = int(std::min<int64_t>(kLanes, n - start));
        for (int b = 0; b < some; ++b) {
            const int64_t* mine = candidates + (start + b) * C;
            for (int64_t j = 0; j < C; ++j) {
                near[j][b] = p[(start + b) * H + mine[j]];
                const double* row = gram + mine[j] * H;
                for (int64_t i = 0; i <= j; ++i) pairs[pair_of(i, j)][b] = row[mine[i]];
            }
        }
        for (int64_t v = 0; v < m; ++v)
            for (int64_t j = 0; j < C; ++j)
                gains[v * C + j] =
                    values[v] * (near[j] - 0.5 * values[v] * pairs[pair_of(j, j)]);
        for (int64_t k = 0; k < K; ++k) {
            const int32_t *places = which + k * most, *ones = worth + k * most;
            const int last = sizes[k] - 1;
            Lanes inner{};
            for (int r = 0; r < last; ++r)
                inner += values[ones[r]] * pairs[pair_of(places[r], places[last])];
            gains[m * C + k] = gains[parents[k]] + gains[ones[last] * C + places[last]] -
                               values[ones[last]] * inner;
        }
        for (int b = 0; b < some; ++b) {
            const int64_t i = start + b;
            double* row = out + i * M;
            row[0] = base[i] + log_prior[0];
            for (int64_t v = 0; v < m; ++v)
                for (int64_t h = 0; h < H; ++h) {
                    const double own = 0.5 * values[v] * gram[h * H + h];
                    row[1 + v * H + h] = values[v] * scale * (p[i * H + h] - own) + base[i] +
                                         log_prior[1 + v * H + h];
                }
            for (int64_t k = 0; k < K; ++k)
                row[first + k] = gains[m * C + k][b] * scale + base[i] + log_prior[first + k];
        }
    }
}

// How likely a combination and all that extend it are together is added to its parent, so that each
// pair of causes is met once for the last cause of each.
void sum_moments(int64_t n, int64_t H, int64_t C, int64_t K, int64_t most, int64_t m,
                 const double* values, const int64_t* candidates, const int32_t* sizes,
                 const int32_t* which, const int32_t* worth, const int32_t* parents,
                 const double* posterior, double* means, double* second, double* counts,
                 double* weights) {
    const int64_t M = 1 + m * H + K, first = 1 + m * H;
    std::vector<Lanes> shares(m * C + K), pairs(C * (C + 1) / 2), ends(m * C);
    for (int64_t start = 0; start < n; start += kLanes) {
        const int some = int(std::min<int64_t>(kLanes, n - start));
        std::fill(shares.begin(), shares.begin() + m * C, Lanes{});
        std::fill(pairs.begin(), pairs.end(), Lanes{});
        std::fill(ends.begin(), ends.end(), Lanes{});
        for (int b = 0; b < some; ++b)
            for (int64_t k = 0; k < K; ++k)
                shares[m * C + k][b] = posterior[(start + b) * M + first + k];
        for (int64_t k = K; k-- > 0;) {
            const int32_t *places = which + k * most, *ones = worth + k * most;
            const int last = sizes[k] - 1;
            const Lanes share = shares[m * C + k], part = values[ones[last]] * share;
            shares[parents[k]] += share;
            ends[ones[last] * C + places[last]] += share;
            for (int r = 0; r < last; ++r)
                pairs[pair_of(places[r], places[last])] += values[ones[r]] * part;
        }
        Lanes whole{};
        for (int64_t at = 0; at < m * C; ++at) whole += shares[at];
        for (int64_t v = 0; v < m; ++v)
            for (int64_t j = 0; j < C; ++j) {
                const Lanes often = shares[v * C + j] + ends[v * C + j];
                for (int b = 0; b < some; ++b) {
                    means[(start + b) * H + candidates[(start + b) * C + j]] +=
                        values[v] * often[b];
                    counts[v] += often[b];
                }
                pairs[pair_of(j, j)] += values[v] * values[v] * often;
            }
        for (int b = 0; b < some; ++b) {
            const int64_t i = start + b, *mine = candidates + i * C;
            weights[i] = whole[b] + posterior[i * M];
            for (int64_t v = 0; v < m; ++v) {
                const double value = values[v], *row = posterior + i * M + 1 + v * H;
                double sum = 0;
                for (int64_t h = 0; h < H; ++h) {
                    sum += row[h];
                    means[i * H + h] += value * row[h];
                    second[h * H + h] += value * value * row[h];
                }
                counts[v] += sum;
                weights[i] += sum;
            }
            for (int64_t j = 0; j < C; ++j)
                for (int64_t r = 0; r <= j; ++r)
                    second[mine[r] * H + mine[j]] += pairs[pair_of(r, j)][b];
        }
    }
    for (int64_t i = 0; i < H; ++i)
        for (int64_t j = 0; j < i; ++j) second[i * H + j] = second[j * H + i];
}

void posteriors(int64_t n, int64_t M, double temperature, double least, double* logp,
                double* evidence) {
    const double share = 1 / temperature;
    for (int64_t i = 0; i < n; ++i) {
        double* row = logp + i * M;
        Lanes highest = load(row, M), sums{}, plain{};
        for (int64_t m = kLanes; m < M; m += kLanes) highest = larger(highest, load(row + m, M - m));
        double most = highest[0];
        for (int b = 1; b < kLanes; ++b) most = most < highest[b] ? highest[b] : most;
        for (int64_t m = 0; m < M; m += kLanes) {
            const Lanes x = load(row + m, M - m) - most;
            if (temperature != 1) plain += exp_of(larger(x, Lanes{} - 700.0));
            const Lanes chance = exp_of(larger(x, Lanes{} + least) * share);
            sums += chance;
            store(chance, row + m, M - m);
        }
        const double total = sum_of(sums);
        evidence[i] = most + std::log(temperature != 1 ? sum_of(plain) : total);
        for (int64_t m = 0; m < M; ++m) row[m] *= 1 / total;
    }
}

void overshoot(int64_t n, int64_t H, int64_t D, const double* data, const double* W, double* out) {
    for (int64_t i = 0; i < n; ++i)
        for (int64_t h = 0; h < H; ++h) {
            const double *y = data + i * D, *w = W + h * D;
            double sum = 0;
            for (int64_t d = 0; d < D; ++d) sum += w[d] > y[d] ? w[d] - y[d] : 0.0;
            out[i * H + h] = sum;
        }
}

void max_errors(int64_t n, int64_t D, int64_t C, int64_t K, int64_t most, const double* data,
                const double* W, const int64_t* candidates, const int32_t* sizes,
                const int32_t* which, double* out, int64_t stride, int64_t by_magnitude) {
    std::vector<double> best(D);
    const double* rows[kMost];
    for (int64_t i = 0; i < n; ++i) {
        const int64_t* mine = candidates + i * C;
        for (int64_t k = 0; k < K; ++k) {
            for (int j = 0; j < sizes[k]; ++j) rows[j] = W + mine[which[k * most + j]] * D;
            out[i * stride + k] =
                by_magnitude ? error_of<true>(data + i * D, rows, sizes[k], D, best.data())
                             : error_of<false>(data + i * D, rows, sizes[k], D, best.data());
        }
    }
}

void max_sums(int64_t n, int64_t D, int64_t C, int64_t K, int64_t most, const double* data,
              const double* powers, const double* parts, const int64_t* candidates,
              const int32_t* sizes, const int32_t* which, const double* posterior, double exponent,
              double* mixed, double* seen) {
    std::vector<double> weight(D), share(C * D);
    std::vector<char> used(C);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t* mine = candidates + i * C;
        std::fill(used.begin(), used.end(), 0);
        for (int64_t k = 0; k < K; ++k) {
            const double q = posterior[i * K + k];
            if (q < kUnlikely) continue;
            const int32_t* places = which + k * most;
            std::memcpy(weight.data(), powers + mine[places[0]] * D, sizeof(double) * D);
            for (int j = 1; j < sizes[k]; ++j) {
                const double* row = powers + mine[places[j]] * D;
                for (int64_t d = 0; d < D; ++d) weight[d] += row[d];
            }
            for (int64_t d = 0; d < D; ++d) {
                const double sum = weight[d] > kTiny ? weight[d] : kTiny;
                weight[d] = q * std::exp(-exponent * std::log(sum));
            }
            for (int j = 0; j < sizes[k]; ++j) {
                double* to = share.data() + places[j] * D;
                if (!used[places[j]]) {
                    used[places[j]] = 1;
                    std::memcpy(to, weight.data(), sizeof(double) * D);
                } else {
                    for (int64_t d = 0; d < D; ++d) to[d] += weight[d];
                }
            }
        }
        for (int64_t c = 0; c < C; ++c) {
            if (!used[c]) continue;
            const double *part = parts + mine[c] * D, *from = share.data() + c * D,
                         *y = data + i * D;
            double *to = mixed + mine[c] * D, *count = seen + mine[c] * D;
            for (int64_t d = 0; d < D; ++d) {
                const double one = part[d] * from[d];
                count[d] += one;
                to[d] += one * y[d];
            }
        }
    }
}

void slab_errors(int64_t n, int64_t H, int64_t C, int64_t K, int64_t most, const double* p,
                 const double* square, const double* gram, const double* mu, const double* psi,
                 const int64_t* candidates, const int32_t* sizes, const int32_t* which,
                 double* out, int64_t stride) {
    Slab slab{gram, mu, psi, H, {}, {}, 0, 0};
    int64_t chosen[kMost];
    double solved[kMost];
    for (int64_t i = 0; i < n; ++i)
        for (int64_t k = 0; k < K; ++k) {
            const int size = sizes[k];
            chosen_of(candidates + i * C, which + k * most, size, chosen);
            slab.at(p + i * H, chosen, size);
            double gain = 0;  // square of what remains after forward substitution
            for (int r = 0; r < size; ++r) {
                double sum = slab.left[r];
                for (int c = 0; c < r; ++c) sum -= slab.precision[r * size + c] * solved[c];
                solved[r] = sum / slab.precision[r * size + r];
                gain += solved[r] * solved[r];
            }
            out[i * stride + k] = square[i] - slab.shared - gain + slab.logs;
        }
}

void slab_sums(int64_t n, int64_t H, int64_t C, int64_t K, int64_t most, const double* p,
               const double* gram, const double* mu, const double* psi, const int64_t* candidates,
               const int32_t* sizes, const int32_t* which, const double* posterior, double* means,
               double* moments, double* both) {
    Slab slab{gram, mu, psi, H, {}, {}, 0, 0};
    int64_t chosen[kMost];
    double cov[kMost * kMost], kappa[kMost];
    for (int64_t i = 0; i < n; ++i)
        for (int64_t k = 0; k < K; ++k) {
            const double q = posterior[i * K + k];
            if (q < kUnlikely) continue;
            const int size = sizes[k];
            chosen_of(candidates + i * C, which + k * most, size, chosen);
            slab.at(p + i * H, chosen, size);
            inverse(slab.precision, size, cov);
            for (int r = 0; r < size; ++r) {
                kappa[r] = mu[chosen[r]];
                for (int c = 0; c < size; ++c) kappa[r] += cov[r * size + c] * slab.left[c];
                means[i * H + chosen[r]] += q * kappa[r];
            }
            for (int r = 0; r < size; ++r)
                for (int c = 0; c < size; ++c) {
                    const int64_t cell = chosen[r] * H + chosen[c];
                    moments[cell] += q * (cov[r * size + c] + kappa[r] * kappa[c]);
                    both[cell] += q;
                }
        }
}
}
