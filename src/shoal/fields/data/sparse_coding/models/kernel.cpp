// Combinations of causes held against points: maxima over components, and Gaussian slabs.
//
// Source: Luecke, Eggert, Expectation Truncation, 2010 (maximal causes); Sheikh, Shelton, Luecke, A
// Truncated EM Approach for Spike-and-Slab Sparse Coding, 2014 (slabs).
//
// Arrays are in C order: data [n, D], candidates [n, C] of H components, combinations: sizes [K] and
// which [K, most] among the candidates of a point, posteriors [n, K].

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// States this unlikely change no sum by more than rounding does.
constexpr double kUnlikely = 1e-16;
constexpr double kTiny = 1e-300;
constexpr int kMost = 16;  // causes of a combination

// e^x of a number from -700 to 0, to the last bit but one; the loop over it becomes vectors.
inline double exp_of(double x) {
    const double k = std::floor(x * 1.4426950408889634 + 0.5);
    const double r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    double sum = 1.0 / 6227020800.0;
    for (const double one : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0,
                             120.0, 24.0, 6.0, 2.0, 1.0, 1.0})
        sum = sum * r + 1.0 / one;
    const int64_t bits = (static_cast<int64_t>(k) + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, sizeof power);
    return sum * power;
}

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

}  // namespace

extern "C" {

void posteriors(int64_t n, int64_t M, double temperature, double least, double* logp,
                double* evidence) {
    for (int64_t i = 0; i < n; ++i) {
        double* row = logp + i * M;
        double most = row[0], total = 0;
        for (int64_t m = 1; m < M; ++m) most = row[m] > most ? row[m] : most;
        if (temperature != 1) {
            for (int64_t m = 0; m < M; ++m) total += exp_of(std::max(row[m] - most, -700.0));
            evidence[i] = most + std::log(total);
            total = 0;
        }
        for (int64_t m = 0; m < M; ++m) {
            row[m] = exp_of(std::max(row[m] - most, least) / temperature);
            total += row[m];
        }
        if (temperature == 1) evidence[i] = most + std::log(total);
        const double share = 1 / total;
        for (int64_t m = 0; m < M; ++m) row[m] *= share;
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
