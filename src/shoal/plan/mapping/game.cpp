// The game of memory mapping and a search by a learned model, for mapping/native.py.
// The rules are those of mapping/game.py, which says what they mean; tests hold the two together.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

using i64 = int64_t;
enum { DROP = 0, NO_COPY = 1, COPY = 2 };

struct Problem {  // as _Problem in native.py
  i64 slots, decisions, buffers, room, best_fit, all_slow, all_fast;
  const i64 *compute, *slot, *buffer, *write, *slow, *fast, *following, *left;
  const i64 *size, *made, *last, *output, *copy;
};

struct Stay { i64 b, start, end, address, k; };
struct Debt { i64 b, left, k; };

static const int COLUMNS = 20, ROWS = 8, LINKS = 8, AHEAD = 6, EACH = 11;
static const int COLUMN[COLUMNS] = {-6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32};
static const int OBSERVED = COLUMNS * ROWS + LINKS + AHEAD * EACH + 5;

struct Game {
  const Problem &p;
  i64 k = 0, now = 0, drain = 0, saved = 0;
  double mean_d, mean_copy = 0;
  std::vector<i64> memory, busy, current, used, ready;
  std::vector<Stay> stays;
  std::vector<Debt> debts;
  std::vector<std::pair<i64, i64>> taken, pieces;

  explicit Game(const Problem &problem)
      : p(problem), memory(p.slots, 0), busy(p.slots, 0), current(p.buffers, -1),
        used(p.buffers, -1), ready(p.buffers, 0) {
    for (i64 j = 0; j < p.decisions; j++) memory[p.slot[j]] += p.slow[j];
    busy = memory;
    for (i64 b = 0; b < p.buffers; b++) {
      ready[b] = p.made[b] < 0 ? 0 : p.slots + 2;
      mean_copy += double(p.copy[b]) / p.buffers;
    }
    mean_d = std::max(1.0, double(p.all_slow) / p.slots);
    settle();
  }
  bool done() const { return k == p.decisions; }
  i64 duration(i64 t) const { return std::max(p.compute[t], memory[t]); }
  i64 free_at(i64 t) const { return duration(t) - busy[t]; }
  i64 home_end(i64 b) const { return p.output[b] ? p.slots - 1 : p.last[b]; }

  i64 hole(i64 b, i64 start, i64 end) {
    i64 size = p.size[b];
    taken.clear();
    for (const Stay &s : stays)
      if (s.start <= end && s.end >= start) taken.push_back({s.address, s.address + p.size[s.b]});
    std::sort(taken.begin(), taken.end());
    taken.push_back({p.room, p.room});
    i64 at = 0, best = -1, least = p.room + 1;
    for (auto &one : taken) {
      i64 gap = one.first - at;
      if (gap >= size && gap < least) {
        if (!p.best_fit) return at;
        best = at;
        least = gap;
      }
      at = std::max(at, one.second);
    }
    return best;
  }
  bool extends(i64 b, i64 t) const {
    if (current[b] < 0) return false;
    const Stay &mine = stays[current[b]];
    if (mine.end >= t) return true;
    i64 top = mine.address + p.size[b];
    for (const Stay &s : stays)
      if (s.start <= t && s.end > mine.end && s.address < top && mine.address < s.address + p.size[s.b])
        return false;
    return true;
  }
  i64 fetch(i64 b, i64 t) {  // address, with the link time in `pieces`; -1 where there is no room
    i64 need = p.copy[b];
    pieces.clear();
    if (p.size[b] > p.room) return -1;
    for (i64 at = t - 1; at >= ready[b]; at--) {
      i64 take = std::min(free_at(at), need);
      if (take > 0) {
        pieces.push_back({at, take});
        need -= take;
      }
      if (need == 0) return hole(b, at, t);
    }
    return -1;
  }
  int legal() {  // a bit for each action
    i64 b = p.buffer[k], t = p.slot[k];
    if (p.write[k]) {
      bool fits = p.size[b] <= p.room && hole(b, t, home_end(b)) >= 0;
      bool output = p.output[b];
      return 1 | (fits && !output) << 1 | (fits && (output || p.following[k] >= 0)) << 2;
    }
    bool there = ready[b] <= t;
    bool covered = current[b] >= 0 && stays[current[b]].end >= t;
    return int(there) | extends(b, t) << 1 | (there && !covered && fetch(b, t) >= 0) << 2;
  }
  i64 step(int action) {
    i64 b = p.buffer[k], t = p.slot[k], before = duration(t);
    if (action != DROP) {
      memory[t] += p.fast[k] - p.slow[k];
      busy[t] -= p.slow[k];
      used[b] = t;
    }
    if (p.write[k]) {
      if (action == DROP) ready[b] = t + 1;
      else {
        i64 end = home_end(b), address = hole(b, t, end);
        current[b] = i64(stays.size());
        stays.push_back({b, t, end, address, k});
        if (action == COPY) debts.push_back({b, p.copy[b], k});
      }
    } else if (action == NO_COPY) {
      Stay &mine = stays[current[b]];
      mine.end = std::max(mine.end, t);
    } else if (action == COPY) {
      i64 address = fetch(b, t);
      for (auto &one : pieces) busy[one.first] += one.second;
      current[b] = i64(stays.size());
      stays.push_back({b, pieces.back().first, t, address, k});
    }
    if (t == p.last[b] && !p.output[b]) forget(b);
    k++;
    settle();
    i64 gain = before - duration(t) - (done() ? drain : 0);
    saved += gain;
    return gain;
  }
  void forget(i64 b) {
    debts.erase(std::remove_if(debts.begin(), debts.end(), [&](const Debt &d) { return d.b == b; }),
                debts.end());
  }
  void settle() {
    i64 goal = done() ? p.slots : p.slot[k];
    for (; now < goal; now++) pay(now);
    if (done())
      for (const Debt &d : debts) drain += d.left;
  }
  void pay(i64 t) {
    i64 idle = free_at(t);
    for (Debt &d : debts) {
      i64 take = p.made[d.b] < t ? std::min(idle, d.left) : 0;
      if (take <= 0) continue;
      idle -= take;
      busy[t] += take;
      d.left -= take;
      if (d.left == 0) {
        ready[d.b] = t + 1;
        stays[current[d.b]].end = std::max(t, used[d.b]);
      }
    }
    debts.erase(std::remove_if(debts.begin(), debts.end(), [](const Debt &d) { return !d.left; }),
                debts.end());
  }
  void observe(float *o) {  // as observe() in observation.py
    i64 t = p.slot[k];
    std::memset(o, 0, sizeof(float) * OBSERVED);
    double height = double(p.room) / ROWS;
    for (int c = 0; c < COLUMNS; c++) {
      i64 at = t + COLUMN[c];
      if (at < 0 || at >= p.slots) {
        for (int r = 0; r < ROWS; r++) o[c * ROWS + r] = 1;
        continue;
      }
      for (const Stay &s : stays) {
        if (s.start > at || s.end < at) continue;
        double low = double(s.address), top = low + double(p.size[s.b]);
        for (int r = 0; r < ROWS; r++) {
          double part = std::min(top, (r + 1) * height) - std::max(low, r * height);
          if (part > 0) o[c * ROWS + r] += float(part / height);
        }
      }
    }
    o += COLUMNS * ROWS;
    for (int j = 1; j <= LINKS; j++)
      o[j - 1] = t - j >= 0 ? float(std::min(4.0, double(free_at(t - j)) / mean_copy)) : 0;
    o += LINKS;
    for (int j = 0; j < AHEAD; j++, o += EACH) {
      i64 q = k + j;
      if (q >= p.decisions) continue;
      i64 b = p.buffer[q], at = p.slot[q];
      o[0] = 1;
      o[1] = float(std::min(2.0, double(p.size[b]) / double(std::max<i64>(1, p.room))));
      o[2] = float(p.write[q]);
      o[3] = float(p.output[b]);
      o[4] = float(std::min(4.0, double(p.slow[q] - p.fast[q]) / mean_d));
      o[5] = float(std::min(4.0, double(std::max<i64>(0, memory[at] - p.compute[at])) / mean_d));
      o[6] = p.following[q] < 0 ? 0 : float(std::min(1.0, double(p.slot[p.following[q]] - at) / 16));
      o[7] = current[b] < 0 ? 0.0f : stays[current[b]].end >= at ? 1.0f : 0.5f;
      o[8] = float(ready[b] <= at);
      o[9] = float(std::min(1.0, double(p.left[q]) / 4));
      o[10] = float(at == t);
    }
    int mask = legal();
    o[0] = float(double(k) / double(p.decisions));
    o[1] = float(double(saved) / double(std::max<i64>(1, p.all_slow - p.all_fast)));
    for (int a = 0; a < 3; a++) o[2 + a] = float(mask >> a & 1);
  }
};

// wanted: an action, or 3 for "in fast memory, moved only if it must be".
static int choose(int wanted, int mask) {
  if (wanted == 3) {
    if (mask & 2) return NO_COPY;
    wanted = COPY;
  }
  if (mask >> wanted & 1) return wanted;
  return mask & 1 ? DROP : mask & 2 ? NO_COPY : COPY;
}

struct Random {
  uint64_t state;
  double operator()() {
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return double((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }
};

struct Net {  // weights as [in][out] matrices, each followed by its bias, in the order of use
  int hidden, latent;
  const float *w;
  std::vector<float> a;
  const float *h1, *h2, *g1, *g2, *gr, *f1, *f2;
  Net(const float *weights, int H, int Z) : hidden(H), latent(Z), w(weights), a(H) {
    const float *at = w;
    auto next = [&](int in, int out) { const float *was = at; at += (in + 1) * out; return was; };
    h1 = next(OBSERVED, H); h2 = next(H, Z);
    g1 = next(Z + 3, H); g2 = next(H, Z); gr = next(H, 1);
    f1 = next(Z, H); f2 = next(H, 4);
  }
  static void linear(const float *x, const float *m, int in, int out, float *__restrict y) {
    std::memcpy(y, m + in * out, sizeof(float) * out);
    for (int i = 0; i < in; i++) {
      float v = x[i];
      if (v == 0) continue;
      const float *__restrict row = m + i * out;
      for (int j = 0; j < out; j++) y[j] += v * row[j];
    }
  }
  void relu() { for (float &v : a) v = v > 0 ? v : 0; }
  // Between -1 and 1 and cheap: x / (1 + |x|).
  static void squash(float *z, int n) { for (int i = 0; i < n; i++) z[i] /= 1 + std::fabs(z[i]); }
  void represent(const float *o, float *z) {
    linear(o, h1, OBSERVED, hidden, a.data()); relu();
    linear(a.data(), h2, hidden, latent, z); squash(z, latent);
  }
  float dynamics(const float *z, int action, float *next) {
    std::memcpy(a.data(), g1 + (latent + 3) * hidden, sizeof(float) * hidden);
    const float *row = g1 + (latent + action) * hidden;
    for (int j = 0; j < hidden; j++) a[j] += row[j];
    for (int i = 0; i < latent; i++) {
      const float *__restrict m = g1 + i * hidden;
      float v = z[i];
      for (int j = 0; j < hidden; j++) a[j] += v * m[j];
    }
    relu();
    linear(a.data(), g2, hidden, latent, next);
    for (int i = 0; i < latent; i++) next[i] += z[i];
    squash(next, latent);
    float reward;
    linear(a.data(), gr, hidden, 1, &reward);
    return reward;
  }
  float predict(const float *z, float *prior, int mask) {
    float out[4];
    linear(z, f1, latent, hidden, a.data()); relu();
    linear(a.data(), f2, hidden, 4, out);
    float most = -1e30f, sum = 0;
    for (int i = 0; i < 3; i++) if (mask >> i & 1) most = std::max(most, out[i]);
    for (int i = 0; i < 3; i++) sum += prior[i] = mask >> i & 1 ? std::exp(out[i] - most) : 0;
    for (int i = 0; i < 3; i++) prior[i] /= sum;
    return out[3];
  }
};

struct Node { int visits, child[3]; float reward, value, prior[3]; };

struct Search {
  Net net;
  std::vector<Node> nodes;
  std::vector<float> latents;
  std::vector<int> path;
  float low, high, discount;
  Search(const float *w, int H, int Z, float g) : net(w, H, Z), discount(g) {}
  float *latent(int n) { return latents.data() + size_t(n) * net.latent; }
  // Visits of the root's children; the root's value is returned.
  float run(const float *o, int mask, int simulations, double noise, Random &random, float *share) {
    nodes.assign(1, Node{0, {-1, -1, -1}, 0, 0, {0, 0, 0}});
    latents.resize(size_t(simulations + 2) * net.latent);
    low = 1e30f; high = -1e30f;
    net.represent(o, latent(0));
    float first = net.predict(latent(0), nodes[0].prior, mask);
    for (int a = 0; a < 3; a++) share[a] = float(mask >> a & 1);
    if ((mask & (mask - 1)) == 0) return first;
    if (noise > 0) {
      double drawn[3], sum = 0;
      for (int a = 0; a < 3; a++) sum += drawn[a] = mask >> a & 1 ? -std::log(1 - random()) : 0;
      for (int a = 0; a < 3; a++)
        nodes[0].prior[a] = float((1 - noise) * nodes[0].prior[a] + noise * drawn[a] / sum);
    }
    nodes[0].visits = 1;
    nodes[0].value = first;
    for (int s = 0; s < simulations; s++) simulate(mask);
    float total = 0;
    for (int a = 0; a < 3; a++) {
      int c = nodes[0].child[a];
      share[a] = c < 0 ? 0.0f : float(nodes[c].visits);
      total += share[a];
    }
    for (int a = 0; a < 3; a++) share[a] /= total;
    return nodes[0].value / float(nodes[0].visits);
  }
  void simulate(int mask) {
    path.assign(1, 0);
    int at = 0, action = 0;
    for (;;) {
      const Node &n = nodes[at];
      double scale = std::sqrt(double(n.visits)) * (1.25 + std::log((n.visits + 19653.0) / 19652.0));
      double best = -1e300;
      for (int a = 0; a < 3; a++) {
        if (at == 0 && !(mask >> a & 1)) continue;
        int c = n.child[a];
        double q = 0;
        if (c >= 0 && nodes[c].visits) {
          q = nodes[c].reward + discount * nodes[c].value / nodes[c].visits;
          if (high > low) q = (q - low) / (high - low);
        }
        double score = q + n.prior[a] * scale / (1 + (c < 0 ? 0 : nodes[c].visits));
        if (score > best) { best = score; action = a; }
      }
      int c = n.child[action];
      if (c < 0) break;
      path.push_back(c);
      at = c;
    }
    int made = int(nodes.size());
    nodes[at].child[action] = made;
    nodes.push_back(Node{0, {-1, -1, -1}, 0, 0, {0, 0, 0}});
    nodes[made].reward = net.dynamics(latent(at), action, latent(made));
    float value = net.predict(latent(made), nodes[made].prior, 7);
    path.push_back(made);
    for (int i = int(path.size()) - 1; i >= 0; i--) {
      Node &n = nodes[path[i]];
      n.visits++;
      n.value += value;
      float q = n.reward + discount * n.value / float(n.visits);
      if (i) { low = std::min(low, q); high = std::max(high, q); }
      value = n.reward + discount * value;
    }
  }
};

extern "C" {

int mapping_observed() { return OBSERVED; }

// Plays what is wanted where it is legal; out: what was played. Returns ticks.
i64 mapping_replay(const Problem *p, const int8_t *wanted, int8_t *played) {
  Game g(*p);
  while (!g.done()) {
    int action = choose(wanted[g.k], g.legal());
    played[g.k] = int8_t(action);
    g.step(action);
  }
  return p->all_slow - g.saved;
}

// Plays `actions` and says what was seen on the way: observations [D, O], masks and rewards [D].
void mapping_trace(const Problem *p, const int8_t *actions, float *seen, int8_t *masks, i64 *rewards) {
  Game g(*p);
  while (!g.done()) {
    i64 k = g.k;
    g.observe(seen + k * OBSERVED);
    masks[k] = int8_t(g.legal());
    rewards[k] = g.step(actions[k]);
  }
}

// One game by search with a learned model. The first `given` actions are played as they are.
i64 mapping_play(const Problem *p, const float *weights, int hidden, int latent, double discount,
                 int simulations, double temperature, double noise, uint64_t seed, i64 given,
                 int8_t *actions, float *seen, int8_t *masks, i64 *rewards, float *shares, float *values) {
  Game g(*p);
  Search search(weights, hidden, latent, float(discount));
  Random random{seed};
  while (!g.done()) {
    i64 k = g.k;
    g.observe(seen + k * OBSERVED);
    int mask = g.legal();
    masks[k] = int8_t(mask);
    float *share = shares + 3 * k;
    int action = k < given ? actions[k] : -1;
    values[k] = search.run(seen + k * OBSERVED, mask, simulations, k < given ? 0 : noise, random, share);
    if (action < 0) {
      double odds[3], sum = 0;
      int most = 0;
      for (int a = 0; a < 3; a++) {
        if (share[a] > share[most]) most = a;
        odds[a] = share[a] > 0 && temperature > 0 ? std::pow(double(share[a]), 1 / temperature) : 0;
        sum += odds[a];
      }
      action = most;
      if (temperature > 0) {
        double drawn = random() * sum;
        for (int a = 0; a < 3; a++)
          if (odds[a] > 0) { action = a; if ((drawn -= odds[a]) < 0) break; }
      }
    }
    actions[k] = int8_t(action);
    rewards[k] = g.step(action);
  }
  return p->all_slow - g.saved;
}

// Search anew with other weights from what was seen.
void mapping_reanalyse(const float *weights, int hidden, int latent, double discount,
                       int simulations, uint64_t seed, i64 count, const float *seen, const int8_t *masks, float *shares, float *values) {
  Search search(weights, hidden, latent, float(discount));
  Random random{seed};
  for (i64 i = 0; i < count; i++)
    values[i] = search.run(seen + i * OBSERVED, masks[i], simulations, 0, random, shares + 3 * i);
}
}
