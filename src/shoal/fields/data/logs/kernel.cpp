// Lines of a log: where they are, the fields of their headers, the tree of templates of Drain, and
// the parameters of a line under its template. reference.py has the same in Python.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace {

inline bool space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
inline bool digit(char c) { return c >= '0' && c <= '9'; }

// A literal at a place of the text; a space of it stands for one or more where `flexible`.
// Returns the end of the match, or -1.
// With `nothing_before` its first space may be missing, and with `nothing_after` its last one at the
// text's end: the parameter beside it is no token.
int64_t literal_at(const char *lit, int64_t n, const char *text, int64_t at, int64_t end,
                   bool flexible, bool nothing_before = false, bool nothing_after = false) {
    int64_t k = 0;
    if (nothing_before && n && lit[0] == ' ' && (at >= end || !space(text[at]))) k = 1;
    for (; k < n; ++k) {
        if (nothing_after && k == n - 1 && lit[k] == ' ' && at == end) return at;
        if (flexible && lit[k] == ' ') {
            if (at >= end || !space(text[at])) return -1;
            while (at < end && space(text[at])) ++at;
        } else {
            if (at >= end || text[at] != lit[k]) return -1;
            ++at;
        }
    }
    return at;
}

// ---------------------------------------------------------------------------- headers

enum { FIELD = 0, LITERAL = 1, OPEN = 2, CLOSE = 3 };

struct Header {
    const int32_t *items;  // [n, 3]: kind, and of a field its number; of a literal offset and
    int64_t n;             // length; of an optional group the item after its end
    const char *texts;
    bool flexible;
    const char *line;
    int64_t end;
    int64_t *spans;  // [fields, 2]
    // Places at which the items from i on cannot match: without them a line that has no match
    // would be tried in every way of cutting it.
    std::vector<uint8_t> failed;

    bool match(int64_t i, int64_t at) {
        const int64_t key = i * (end + 1) + at;
        if (failed[key]) return false;
        if (attempt(i, at)) return true;
        failed[key] = 1;
        return false;
    }

    bool attempt(int64_t i, int64_t at) {
        while (i < n) {
            const int32_t *item = items + 3 * i;
            if (item[0] == LITERAL) {
                at = literal_at(texts + item[1], item[2], line, at, end, flexible);
                if (at < 0) return false;
                ++i;
            } else if (item[0] == CLOSE) {
                ++i;
            } else if (item[0] == OPEN) {
                if (match(i + 1, at)) return true;
                for (int64_t k = i + 1; k < item[1]; ++k)
                    if (items[3 * k] == FIELD)
                        spans[2 * items[3 * k + 1]] = spans[2 * items[3 * k + 1] + 1] = -1;
                i = item[1];
            } else {
                int64_t *span = spans + 2 * item[1];
                if (i + 1 == n) {
                    span[0] = at, span[1] = end;
                    return true;
                }
                const int32_t *next = item + 3;
                const char first = next[0] == LITERAL ? texts[next[1]] : 0;
                const bool any = next[0] != LITERAL || (flexible && first == ' ');
                for (int64_t e = at; e <= end; ++e) {
                    if (!any) {
                        const void *p = memchr(line + e, first, end - e);
                        if (!p) return false;
                        e = static_cast<const char *>(p) - line;
                    } else if (next[0] == LITERAL && (e == end || !space(line[e]))) {
                        continue;
                    }
                    if (match(i + 1, e)) {
                        span[0] = at, span[1] = e;
                        return true;
                    }
                }
                return false;
            }
        }
        return at == end;
    }
};

// ---------------------------------------------------------------------------- the tree

inline uint64_t mixed(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Two hashes of 64 bits: that of different lines both are equal does not happen.
void hashed(const char *text, int64_t n, uint64_t out[2]) {
    uint64_t a = 0x9E3779B97F4A7C15ull ^ n, b = 0xC2B2AE3D27D4EB4Full + n, word = 0;
    int64_t at = 0;
    for (; at + 8 <= n; at += 8) {
        memcpy(&word, text + at, 8);
        a = mixed(a ^ word, 0xD6E8FEB86659FD93ull);
        b = mixed(b + word, 0xA0761D6478BD642Full);
    }
    word = 0;
    memcpy(&word, text + at, n - at);
    out[0] = mixed(a ^ word, 0xE7037ED1A0B428DBull);
    out[1] = mixed(b + word, 0x8EBC6AF09C88C6E3ull);
}

constexpr int WILDCARD = 0, UNKNOWN = -1;
constexpr size_t CACHE = 1 << 16;

struct Node {
    std::unordered_map<int, int> children;
    std::vector<int> groups;
};

struct Root {
    int node;
    uint32_t version;  // grows with every change below
};

struct Known {
    uint64_t hash[2];
    int32_t group;
    int32_t root;
    uint32_t version;
};

struct Tree {
    int64_t routed, max_children;
    double similarity;
    bool exact, runs;
    std::vector<std::string *> tokens;
    std::vector<uint8_t> numeric;
    std::unordered_map<std::string_view, int> ids;
    std::vector<Node> nodes;
    std::vector<Root> roots;
    std::unordered_map<int64_t, int> root_of;
    std::vector<std::vector<int>> templates;
    std::vector<Known> cache;
    std::vector<std::string_view> split;
    std::vector<int> seq;

    Tree() : cache(CACHE) {
        for (auto &known : cache) known.group = -1;
        intern("<*>");
    }
    ~Tree() {
        for (auto *token : tokens) delete token;
    }

    int intern(std::string_view token) {
        const auto found = ids.find(token);
        if (found != ids.end()) return found->second;
        auto *kept = new std::string(token);
        const int id = static_cast<int>(tokens.size());
        tokens.push_back(kept);
        bool any = false;
        for (const char c : *kept) any |= digit(c);
        numeric.push_back(any);
        ids.emplace(std::string_view(*kept), id);
        return id;
    }

    void cut(const char *text, int64_t n) {
        split.clear();
        int64_t at = 0;
        if (exact) {
            while (n) {
                const void *p = memchr(text + at, ' ', n - at);
                const int64_t end = p ? static_cast<const char *>(p) - text : n;
                split.emplace_back(text + at, end - at);
                if (!p) break;
                at = end + 1;
            }
            return;
        }
        while (at < n) {
            while (at < n && space(text[at])) ++at;
            const int64_t begin = at;
            while (at < n && !space(text[at])) ++at;
            if (at == begin) continue;
            const std::string_view token(text + begin, at - begin);
            if (runs && token == "<*>" && !split.empty() && split.back() == "<*>") continue;
            split.push_back(token);
        }
    }

    int child(int node, int id) const {
        const auto &children = nodes[node].children;
        auto found = children.find(id);
        if (found == children.end()) found = children.find(WILDCARD);
        return found == children.end() ? -1 : found->second;
    }

    int node_below(int node, int id) {
        const int made = static_cast<int>(nodes.size());
        nodes.emplace_back();
        nodes[node].children.emplace(id, made);
        return made;
    }

    // The group of the tokens in `seq`, or -1.
    int search(int root) const {
        int node = roots[root].node;
        const int64_t n = seq.size();
        for (int64_t k = 0; k < routed && k < n; ++k) {
            node = child(node, seq[k]);
            if (node < 0) return -1;
        }
        int best = -1;
        double most = -1.0;
        int64_t free = -1;
        for (const int group : nodes[node].groups) {
            const int *other = templates[group].data();
            int64_t same = 0, wild = 0, equal = 0;
            for (int64_t k = 0; k < n; ++k) {
                wild += other[k] == WILDCARD;
                equal += other[k] == seq[k];
                same += (other[k] == seq[k]) & (other[k] != WILDCARD);
            }
            if (equal == n) return group;  // however few of them are no wildcards
            const double share = n ? static_cast<double>(same) / n : 1.0;
            if (share > most || (share == most && wild > free)) {
                best = group, most = share, free = wild;
            }
        }
        return most >= similarity ? best : -1;
    }

    int add_group(int root) {
        for (size_t k = 0; k < seq.size(); ++k) seq[k] = intern(split[k]);
        int node = roots[root].node;
        for (size_t k = 0; k < seq.size() && static_cast<int64_t>(k) < routed; ++k) {
            const auto &children = nodes[node].children;
            const auto found = children.find(seq[k]);
            const bool has_wild = children.count(WILDCARD);
            const int64_t size = children.size();
            if (found != children.end()) {
                node = found->second;
            } else if (!numeric[seq[k]] && size + !has_wild < max_children) {
                node = node_below(node, seq[k]);
            } else {
                node = has_wild ? children.find(WILDCARD)->second : node_below(node, WILDCARD);
            }
        }
        const int group = static_cast<int>(templates.size());
        templates.push_back(seq);
        nodes[node].groups.push_back(group);
        return group;
    }

    int add(const char *text, int64_t n) {
        uint64_t hash[2];
        hashed(text, n, hash);
        Known &known = cache[hash[0] & (CACHE - 1)];
        if (known.group >= 0 && known.hash[0] == hash[0] && known.hash[1] == hash[1] &&
            known.version == roots[known.root].version)
            return known.group;
        cut(text, n);
        seq.resize(split.size());
        for (size_t k = 0; k < split.size(); ++k) {
            const auto found = ids.find(split[k]);
            seq[k] = found == ids.end() ? UNKNOWN : found->second;
        }
        const int64_t length = split.size();
        auto place = root_of.find(length);
        if (place == root_of.end()) {
            const int node = static_cast<int>(nodes.size());
            nodes.emplace_back();
            roots.push_back({node, 0});
            place = root_of.emplace(length, static_cast<int>(roots.size()) - 1).first;
        }
        const int root = place->second;
        int group = search(root);
        if (group < 0) {
            group = add_group(root);
            ++roots[root].version;
        } else {
            auto &ids_of = templates[group];
            bool changed = false;
            for (int64_t k = 0; k < length; ++k) {
                if (ids_of[k] != seq[k] && ids_of[k] != WILDCARD) {
                    ids_of[k] = WILDCARD;
                    changed = true;
                }
            }
            roots[root].version += changed;
        }
        known = {{hash[0], hash[1]}, group, root, roots[root].version};
        return group;
    }
};

// ---------------------------------------------------------------------------- parameters

struct Pieces {
    std::vector<std::string_view> literal;  // around the wildcards, some empty
};

Pieces pieces_of(const char *text, int64_t n) {
    Pieces result;
    std::string_view rest(text, n);
    for (size_t at; (at = rest.find("<*>")) != std::string_view::npos; rest.remove_prefix(at + 3))
        result.literal.push_back(rest.substr(0, at));
    result.literal.push_back(rest);
    return result;
}

// Writes begin and end of each parameter; false where the text is not of the template.
bool matched(const Pieces &pieces, const char *text, int64_t n, bool flexible, int64_t *out,
             bool lenient = false) {
    int64_t begin = 0;
    if (flexible) {
        while (begin < n && space(text[begin])) ++begin;
        while (n > begin && space(text[n - 1])) --n;
    }
    const auto &literal = pieces.literal;
    const size_t last = literal.size() - 1;
    int64_t at = literal_at(literal[0].data(), literal[0].size(), text, begin, n, flexible, false,
                            lenient && last);
    if (at < 0) return false;
    if (last == 0) return at == n;
    for (size_t k = 1; k <= last; ++k) {
        const char *lit = literal[k].data();
        const int64_t size = literal[k].size();
        int64_t from = at, end = -1;
        if (k == last && !size) {
            from = end = n;
        } else if (k == last && !flexible) {
            from = n - size;
            end = from >= at ? literal_at(lit, size, text, from, n, false) : -1;
        } else {
            for (;; ++from) {
                if (from > n) return false;
                end = literal_at(lit, size, text, from, n, flexible, lenient && from == at,
                                 lenient && k < last);
                if (end >= 0 && (k < last || end == n)) break;
            }
        }
        if (end < 0) return false;
        *out++ = at;
        *out++ = from;
        at = end;
    }
    return true;
}

}  // namespace

extern "C" {

// Begins and ends of lines without their ends, which are 0 \n, 1 \r\n, 2 none. Returns how many.
int64_t split_lines(const char *text, int64_t n, int64_t *begin, int64_t *end, uint8_t *ending) {
    int64_t lines = 0, at = 0;
    while (at < n) {
        const void *p = memchr(text + at, '\n', n - at);
        const int64_t stop = p ? static_cast<const char *>(p) - text : n;
        const bool both = p && stop > at && text[stop - 1] == '\r';
        begin[lines] = at;
        end[lines] = stop - both;
        ending[lines++] = p ? both : 2;
        at = stop + 1;
    }
    return lines;
}

// Fields of headers: spans [lines, fields, 2] in the text. A line without a match is its own last
// field, and ok is 0.
void headers(const char *text, const int64_t *begin, const int64_t *end, int64_t lines,
             const int32_t *items, int64_t n, const char *texts, int64_t fields, int64_t flexible,
             int64_t *spans, uint8_t *ok) {
    Header header{items, n, texts, flexible != 0, nullptr, 0, nullptr, {}};
    for (int64_t k = 0; k < lines; ++k) {
        int64_t from = begin[k], to = end[k];
        if (flexible) {
            while (from < to && space(text[from])) ++from;
            while (to > from && space(text[to - 1])) --to;
        }
        header.line = text + from;
        header.end = to - from;
        header.spans = spans + k * fields * 2;
        for (int64_t f = 0; f < 2 * fields; ++f) header.spans[f] = -1;
        header.failed.assign((n + 1) * (header.end + 1), 0);
        ok[k] = header.match(0, 0);
        if (!ok[k]) {
            for (int64_t f = 0; f < 2 * fields; ++f) header.spans[f] = -1;
            header.spans[2 * fields - 2] = 0;
            header.spans[2 * fields - 1] = header.end;
        }
        for (int64_t f = 0; f < 2 * fields; ++f)
            if (header.spans[f] >= 0) header.spans[f] += from;
    }
}

// Copies spans (begin at stride words of each other, end after begin) one behind the other; offsets
// has lines + 1. With out == null only offsets are written.
void gather(const char *text, const int64_t *spans, int64_t stride, int64_t lines, int64_t *offsets,
            char *out) {
    int64_t at = 0;
    for (int64_t k = 0; k < lines; ++k) {
        const int64_t *span = spans + k * stride;
        const int64_t size = span[0] < 0 ? 0 : span[1] - span[0];
        offsets[k] = at;
        if (out && size) memcpy(out + at, text + span[0], size);
        at += size;
    }
    offsets[lines] = at;
}

void *tree_new(int64_t routed, double similarity, int64_t max_children, int64_t exact,
               int64_t runs) {
    auto *tree = new Tree();
    tree->routed = routed;
    tree->similarity = similarity;
    tree->max_children = max_children;
    tree->exact = exact != 0;
    tree->runs = runs != 0;
    return tree;
}

void tree_free(void *tree) { delete static_cast<Tree *>(tree); }

// Groups of lines, in order.
void tree_add(void *tree, const char *text, const int64_t *offsets, int64_t lines, int32_t *groups) {
    auto *one = static_cast<Tree *>(tree);
    for (int64_t k = 0; k < lines; ++k)
        groups[k] = one->add(text + offsets[k], offsets[k + 1] - offsets[k]);
}

int64_t tree_size(const void *tree) {
    return static_cast<const Tree *>(tree)->templates.size();
}

// Text of all templates, each ended by a line feed; returns its bytes. With out == null only counts.
int64_t tree_templates(const void *tree, char *out) {
    const auto *one = static_cast<const Tree *>(tree);
    int64_t at = 0;
    for (const auto &group : one->templates) {
        for (size_t k = 0; k < group.size(); ++k) {
            const std::string &token = *one->tokens[group[k]];
            if (out) {
                if (k) out[at] = ' ';
                memcpy(out + at + (k > 0), token.data(), token.size());
            }
            at += token.size() + (k > 0);
        }
        if (out) out[at] = '\n';
        ++at;
    }
    return at;
}

// Parameters of lines: spans in the text, two words each, as many as the template has wildcards.
// ok[k] is 0 where the line is not of its template; its spans are empty then.
void parameters(const char *text, const int64_t *offsets, int64_t lines, const int32_t *ids,
                const char *templates, const int64_t *places, int64_t n, int64_t flexible,
                int64_t *spans, uint8_t *ok) {
    std::vector<Pieces> pieces;
    for (int64_t k = 0; k < n; ++k)
        pieces.push_back(pieces_of(templates + places[k], places[k + 1] - places[k]));
    for (int64_t k = 0; k < lines; ++k) {
        const Pieces &one = pieces[ids[k]];
        const int64_t count = 2 * (one.literal.size() - 1);
        const char *line = text + offsets[k];
        const int64_t size = offsets[k + 1] - offsets[k];
        // In a template of lines of several lengths a wildcard may stand for no token at all.
        ok[k] = matched(one, line, size, flexible, spans) ||
                (flexible && matched(one, line, size, true, spans, true));
        for (int64_t s = 0; s < count; ++s) spans[s] = ok[k] ? spans[s] + offsets[k] : offsets[k];
        spans += count;
    }
}

}  // extern "C"
