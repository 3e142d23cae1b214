// Attention of many new tokens per request: each sees itself, those before it in the step, and a prefix in pages.
//
// Work is divided among threads by (request, KV head, stretch of tokens). The query rows of such an item are, token by
// token, the query heads that share the KV head. An item goes through packed blocks of the entries that it sees, and
// through each with its rows in tiles (tiles.h). Blocks begin at fixed entries and rows are independent of one another,
// so a result depends neither on the rest of the batch nor on the number of threads, nor on later tokens.
//
// New entries are read where the model left them and are packed once. What is before them is read from pages, and each
// item packs it anew, since it may be far larger.

#include <omp.h>

#include <memory>
#include <vector>

#include "amx.h"
#include "pages.h"
#include "rotation.h"
#include "tiles.h"

namespace {

struct Shape {
  int heads, group, head_dim;
};

// A matrix whose rows are tokens; the heads of a token lie side by side.
template <class E>
struct Tokens {
  E* data;
  int64_t stride;
  E* head(int64_t token, int64_t offset) const { return data + token * stride + offset; }
};

// Where prefixes are: the row of KV head h of the batch's request i is slots[i] * stride + first + h. pages.h says what
// a page of T is.
template <class T>
struct Prefixes {
  const typename T::type* pages;  // null: there are none
  int page_size;
  const int32_t *arena, *starts, *lengths;  // page ids; of each row, its first page's place there and its entries
  const int64_t* slots;
  int64_t stride, first;
  int64_t row(int request, int head) const { return slots[request] * stride + first + head; }
};

// Queries and output are elements E of the model, entries are of T.
template <class E, class T>
struct Step {
  Tokens<const E> query;
  Tokens<const typename T::type> keys, values;
  Tokens<const float> key_scales, value_scales;  // of each token's heads, where T has scales
  const float* signs;                            // of the rotation of keys that have scales
  Tokens<E> output;
  float* log_sums;        // [tokens][heads * group]: logarithms of the sums of exponentials; null: not asked for
  const float* sinks;     // [heads * group]; null: none
  const int64_t* places;  // of each new token, its row in the matrices; null: the token's own number
  const int32_t* new_tokens;
  Prefixes<T> prefixes;
  Shape shape;
  float scale, cap;  // of logits; cap 0: none
  int64_t place(int token) const { return places ? places[token] : token; }
  float log2_scale() const { return cap ? 1.0f : scale * LOG2_E; }
};

// Tokens of a request that one thread takes, with one KV head.
struct Item {
  int request, head, first_token;  // where the request's tokens begin
  int before, tokens;              // tokens of the request in the step before these, and these
  int all_tokens;                  // of the request in the step
  int prefix;                      // entries before the step's
  int64_t packed;                  // where the step's entries of this head are packed
  int64_t work() const { return (int64_t)tokens * (2 * (prefix + before) + tokens); }
};

// A number of an entry, as arithmetics take it.
template <class T>
auto number(typename T::type element, float scale) {
  if constexpr (T::SCALE)
    return Scaled{element * scale};
  else
    return element;
}

// One of the scales from here on.
template <class T>
float scale(const typename T::type* scales, int64_t place) {
  return T::SCALE ? load<float>(scales + place * T::SCALE) : 1;
}

// An entry's key or value: elements, or what they are times a scale.
template <class T>
struct Row {
  const typename T::type* elements;
  float scale;
  auto operator[](int d) const { return number<T>(elements[d], scale); }
};

// Entries of the step.
template <class E, class T>
struct New {
  typedef T Format;
  const Step<E, T>& step;
  int first_token, head;
  Row<T> key(int entry) const { return row(step.keys, step.key_scales, entry); }
  Row<T> value(int entry) const { return row(step.values, step.value_scales, entry); }
  Row<T> row(Tokens<const typename T::type> elements, Tokens<const float> scales, int entry) const {
    const int64_t place = step.place(first_token + entry);
    return {elements.head(place, head * step.shape.head_dim), T::SCALE ? *scales.head(place, head) : 1};
  }
};

// Entries of a prefix.
template <class T>
struct Stored {
  typedef T Format;
  const typename T::type* pages;
  const int32_t* table;
  PageLayout<T> layout;
  const typename T::type* page(int entry) const {
    return pages + table[entry / layout.page_size] * layout.elements();
  }
  // Scales of keys from this entry's on.
  const typename T::type* key_scales(int entry) const {
    return page(entry) + layout.key_scales() + entry % layout.page_size * T::SCALE;
  }
  Row<T> value(int entry) const {
    const int64_t place = entry % layout.page_size;
    const auto* values = page(entry) + layout.values() + place * layout.head_dim;
    return {values, scale<T>(page(entry) + layout.value_scales(), place)};
  }
};

// Memory that begins with a line of the cache, so that no vector lies on two of them.
template <class T>
class Buffer {
  struct alignas(64) Line {
    char bytes[64];
  };
  std::unique_ptr<Line[]> lines;

 public:
  explicit Buffer(size_t count) : lines(new Line[count * sizeof(T) / sizeof(Line) + 1]) {}
  operator T*() { return reinterpret_cast<T*>(lines.get()); }
};

// Packed keys and values of at most KEYS entries.
template <class U>
struct Block {
  U *keys, *values;
  int count;
  int height;  // units in a panel of values
};

constexpr int round_up(int count, int step) { return (count + step - 1) / step * step; }

// Memory for packed entries, block after block.
template <class A>
struct Packed {
  typedef typename A::Unit Unit;
  int units, value_units;  // of an entry's key; of a unit of entries
  Buffer<Unit> keys, values;
  Packed(int64_t entries, int head_dim)
      : units(head_dim / A::DEPTH),
        value_units(round_up(head_dim, WIDTH)),
        keys(entries * units),
        values(entries / A::DEPTH * value_units) {}

  // `first`: entries before it, in whole panels.
  Block<Unit> block(int64_t first, int count) {
    return {keys + first * units, values + first / A::DEPTH * value_units, count, round_up(count, WIDTH) / A::DEPTH};
  }
};

// What a thread works with.
template <class A>
struct Scratch {
  Buffer<typename A::Unit> query, weights;
  Buffer<float> scores, out;  // out: [rows][head_dim]
  Buffer<Softmax> softmax;    // [rows]
  Packed<A> stored;           // a block of a prefix
  Scratch(int rows, int head_dim, bool has_prefixes)
      : query(rows * head_dim / A::DEPTH),
        weights(A::ROWS * STRIDE / A::DEPTH),
        scores(A::ROWS * STRIDE),
        out(rows * head_dim),
        softmax(rows),
        stored(has_prefixes ? KEYS : 0, head_dim) {}
};

// The rows of an item, rotated like keys, and zeros in those that fill the last tile. What happens to be in memory may
// be subnormal numbers, with which a multiplication takes a hundred times as long.
template <class A, class T>
void load_queries(const Step<typename A::Element, T>& step, const Item& item, int rows, typename A::Unit* query) {
  const int width = step.shape.group * step.shape.head_dim;
  auto* end = query + rows * (step.shape.head_dim / A::DEPTH);
  std::vector<float> turned(T::SCALE ? width : 0);
  for (int i = 0; i < item.tokens; ++i) {
    const auto* from = step.query.head(step.place(item.first_token + item.before + i), item.head * width);
    if (T::SCALE) {
      for (int d = 0; d < width; ++d) turned[d] = A::Elements::value(from[d]);
      for (int d = 0; d < width; d += step.shape.head_dim) rotate(&turned[d], step.shape.head_dim, step.signs);
      for (int d = 0; d < width; d += A::DEPTH) *query++ = A::unit(Scaled{turned[d]}, Scaled{turned[d + A::DEPTH - 1]});
    } else {
      for (int d = 0; d < width; d += A::DEPTH) *query++ = A::unit(from[d], from[d + A::DEPTH - 1]);
    }
  }
  std::fill(query, end, typename A::Unit());
}

// Keys whose dims lie side by side.
template <class A, class E, class T>
void pack_keys(const New<E, T>& entries, int start, int units, Block<typename A::Unit> block) {
  for (int e = 0; e < block.count; ++e) {
    const Row<T> key = entries.key(start + e);
    auto* column = block.keys + e / WIDTH * WIDTH * units + e % WIDTH;
    for (int u = 0; u < units; ++u) column[u * WIDTH] = A::unit(key[u * A::DEPTH], key[(u + 1) * A::DEPTH - 1]);
  }
}

// Keys that are transposed in pages: neighbours in a page and in a panel at a time.
template <class A, class T>
void pack_keys(const Stored<T>& entries, int start, int units, Block<typename A::Unit> block) {
  const int size = entries.layout.page_size;
  for (int e = 0, next; e < block.count; e = next) {
    const int place = (start + e) % size;
    next = std::min({block.count, e + size - place, (e / WIDTH + 1) * WIDTH});
    const auto *keys = entries.page(start + e) + place, *scales = entries.key_scales(start + e);
    auto* panel = block.keys + e / WIDTH * WIDTH * units + e % WIDTH;
    for (int u = 0; u < units; ++u) {
      const auto *first = keys + u * A::DEPTH * size, *last = first + (A::DEPTH - 1) * size;
      for (int i = 0; i < next - e; ++i) {
        const float own = scale<T>(scales, i);
        panel[u * WIDTH + i] = A::unit(number<T>(first[i], own), number<T>(last[i], own));
      }
    }
  }
}

template <class A, class Entries>
void pack(const Entries& entries, int start, int head_dim, Block<typename A::Unit> block) {
  const int units = head_dim / A::DEPTH;
  pack_keys<A>(entries, start, units, block);
  // Zeros in the columns that fill the last vector, as in rows of queries.
  for (int e = block.count; e < round_up(block.count, LANES); ++e)
    for (int u = 0; u < units; ++u) block.keys[e / WIDTH * WIDTH * units + u * WIDTH + e % WIDTH] = 0;
  for (int e = 0; e < block.count; e += A::DEPTH) {
    const Row<typename Entries::Format> first = entries.value(start + e);
    // Of half a pair, what is missing weighs nothing.
    const auto last = entries.value(start + std::min(e + A::DEPTH, block.count) - 1);
    for (int d = 0; d < head_dim; d += WIDTH) {
      auto* panel = block.values + d * block.height + e / A::DEPTH * WIDTH;
      const int width = std::min(WIDTH, head_dim - d);
      for (int i = 0; i < width; ++i) panel[i] = A::unit(first[d + i], last[d + i]);
    }
  }
  // Zeros in what fills the last step of weighted sums.
  const int used = round_up(block.count, A::DEPTH) / A::DEPTH, end = round_up(block.count, A::STEP) / A::DEPTH;
  for (int d = 0; d < head_dim; d += WIDTH)
    std::fill(block.values + d * block.height + used * WIDTH, block.values + d * block.height + end * WIDTH, 0);
}

// One tile of rows. seen(row) says how many keys of the block a row sees; a later one sees no fewer.
template <class A, class T, class Seen>
void attend_tile(const Step<typename A::Element, T>& step, int row, Block<typename A::Unit> block, const Seen& seen,
                 Scratch<A>& scratch) {
  const int head_dim = step.shape.head_dim, units = head_dim / A::DEPTH, most = seen(row + A::ROWS - 1);
  if (most <= 0) return;
  score(A(), scratch.query + row * units, block.keys, most, units, scratch.scores);
  float shrink[A::ROWS];
  for (int r = 0; r < A::ROWS; ++r) {
    float* scores = scratch.scores + r * STRIDE;
    if (step.cap) cap_scores(scores, most, step.scale, step.cap);
    shrink[r] = weigh<A>(scores, std::max(seen(row + r), 0), round_up(most, 2 * LANES), step.log2_scale(),
                         scratch.softmax[row + r], scratch.weights + r * STRIDE / A::DEPTH);
  }
  const int used = round_up(most, A::STEP) / A::DEPTH;
  add(A(), scratch.weights, block.values, block.height, used, shrink, scratch.out + row * head_dim, head_dim);
}

template <class A, class T, class Seen>
void attend_block(const Step<typename A::Element, T>& step, int rows, Block<typename A::Unit> block, const Seen& seen,
                  Scratch<A>& scratch) {
  for (int row = 0; row < rows; row += A::ROWS) attend_tile<A, T>(step, row, block, seen, scratch);
}

// All rows of an item with the entries before the step's.
template <class A, class T>
void attend_prefix(const Step<typename A::Element, T>& step, const Item& item, Scratch<A>& scratch) {
  if (!item.prefix) return;
  const auto& all = step.prefixes;
  const int32_t* table = all.arena + all.starts[all.row(item.request, item.head)];
  const Stored<T> entries = {all.pages, table, {all.page_size, step.shape.head_dim}};
  for (int start = 0; start < item.prefix; start += KEYS) {
    const auto block = scratch.stored.block(0, std::min(KEYS, item.prefix - start));
    pack<A>(entries, start, step.shape.head_dim, block);
    attend_block(step, item.tokens * step.shape.group, block, [&](int) { return block.count; }, scratch);
  }
}

// All rows of an item with the step's entries.
template <class A, class T>
void attend_new(const Step<typename A::Element, T>& step, const Item& item, Packed<A>& packed, Scratch<A>& scratch) {
  const int rows = item.tokens * step.shape.group, seen_by_last = item.before + item.tokens;
  for (int start = 0; start < seen_by_last; start += KEYS) {
    const int count = std::min(KEYS, seen_by_last - start);
    auto block = packed.block(item.packed + start, std::min(KEYS, item.all_tokens - start));
    const auto seen = [&](int row) {  // rows that fill the last tile see what the last row sees
      return std::min(count, item.before + std::min(row, rows - 1) / step.shape.group + 1 - start);
    };
    attend_block(step, rows, block, seen, scratch);
  }
}

// A row's sum, and what its weighted sums are multiplied by. The sink is a logit that gives nothing.
struct Ending {
  float log_sum, factor;
};

inline Ending ending(float logit, float sum, const float* sink) {
  if (!sink) return {logit + std::log2(sum), 1 / sum};
  const float of_sink = *sink * LOG2_E, highest = std::max(logit, of_sink), shrink = std::exp2(logit - highest);
  const float all = sum * shrink + std::exp2(of_sink - highest);
  return {highest + std::log2(all), shrink / all};
}

template <class A, class T>
void write_output(const Step<typename A::Element, T>& step, const Item& item, Scratch<A>& scratch) {
  const auto [heads, group, head_dim] = step.shape;
  for (int row = 0; row < item.tokens * group; ++row) {
    const int64_t token = step.place(item.first_token + item.before + row / group);
    const int head = item.head * group + row % group;
    const Softmax& softmax = scratch.softmax[row];
    const float* sink = step.sinks ? step.sinks + head : nullptr;
    const Ending end = ending(softmax.highest * step.log2_scale(), total(softmax.sum), sink);
    auto* to = step.output.head(token, head * head_dim);
    const float* out = scratch.out + row * head_dim;
    for (int d = 0; d < head_dim; ++d) to[d] = A::Elements::element(out[d] * end.factor);
    if (step.log_sums) step.log_sums[token * heads * group + head] = end.log_sum / LOG2_E;
  }
}

template <class A, class T>
void attend(const Step<typename A::Element, T>& step, const Item& item, Packed<A>& packed, Scratch<A>& scratch) {
  const int head_dim = step.shape.head_dim, rows = round_up(item.tokens * step.shape.group, A::ROWS);
  load_queries<A>(step, item, rows, scratch.query);
  std::fill_n((float*)scratch.out, rows * head_dim, 0.0f);
  std::fill_n((Softmax*)scratch.softmax, rows, Softmax{{}, LOWEST});
  attend_prefix(step, item, scratch);
  attend_new(step, item, packed, scratch);
  write_output(step, item, scratch);
}

// The parts of a step: of every request and head, stretches of at most so many tokens.
template <class E, class T>
std::vector<Item> divide(const Step<E, T>& step, int requests, int most) {
  std::vector<Item> items;
  int64_t packed = 0;
  for (int i = 0, first = 0; i < requests; first += step.new_tokens[i++])
    for (int h = 0; h < step.shape.heads; ++h) {
      const int tokens = step.new_tokens[i];
      const int prefix = step.prefixes.pages ? step.prefixes.lengths[step.prefixes.row(i, h)] - tokens : 0;
      for (int before = 0; before < tokens; before += most)
        items.push_back({i, h, first, before, std::min(most, tokens - before), tokens, prefix, packed});
      packed += round_up(tokens, WIDTH);
    }
  return items;
}

// Tokens of an item: each thread gets several, since they differ, but each item packs its prefix.
template <class A, class T>
int tokens_of_items(const Step<typename A::Element, T>& step, int requests) {
  int64_t tokens = 0;
  for (int i = 0; i < requests; ++i) tokens += step.new_tokens[i];
  const int64_t rows = tokens * step.shape.group * step.shape.heads / (8 * omp_get_max_threads());
  return std::max<int>(1, std::clamp<int64_t>(rows, 8 * A::ROWS, 64 * A::ROWS) / step.shape.group);
}

template <class A, class T>
void prefill(const Step<typename A::Element, T>& step, int requests) {
  const int head_dim = step.shape.head_dim, most = tokens_of_items<A>(step, requests);
  const std::vector<Item> blocks = divide(step, requests, KEYS);
  std::vector<Item> items = divide(step, requests, most);
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.work() > b.work(); });
  const int num_blocks = blocks.size(), num_items = items.size();
  if (!num_items) return;
  Packed<A> packed(blocks.back().packed + round_up(blocks.back().all_tokens, WIDTH), head_dim);
#pragma omp parallel
  {
#pragma omp for schedule(dynamic)
    for (int i = 0; i < num_blocks; ++i) {
      const Item& from = blocks[i];
      const New<typename A::Element, T> entries = {step, from.first_token, from.head};
      pack<A>(entries, from.before, head_dim, packed.block(from.packed + from.before, from.tokens));
    }
    Scratch<A> scratch(round_up(most * step.shape.group, A::ROWS), head_dim, step.prefixes.pages);
    const typename A::Session session;
#pragma omp for schedule(dynamic)
    for (int i = 0; i < num_items; ++i) attend(step, items[i], packed, scratch);
  }
}

// By the arithmetic that is fast here.
template <class T>
void prefill_fast(const Step<float, T>& step, int requests) {
  prefill<Singles<Float32>>(step, requests);
}

template <class T>
void prefill_fast(const Step<uint16_t, T>& step, int requests) {
#ifdef HAS_AMX
  if (step.shape.head_dim % Amx::STEP == 0 && may_use_amx()) return prefill<Amx>(step, requests);
#endif
  prefill<BFloat16Arithmetic>(step, requests);
}

}  // namespace

// query, output: [tokens, heads * group, head_dim]; keys, values: [tokens, heads, head_dim], their scales [tokens,
// heads]; strides are in elements from token to token. pages: see pages.h, or null. starts, lengths: [slots, stride]; a
// length is its prefix and its request's new_tokens, which are positive. places: [sum of new_tokens], of all requests
// in turn, or null. scale is positive, head_dim a multiple of LANES and page_size of 2.
#define PREFILL_ATTENTION(NAME, TYPE, FORMAT)                                                                         \
  extern "C" void NAME(const TYPE* query, int64_t query_stride, const FORMAT::type* keys, int64_t key_stride,         \
                       const FORMAT::type* values, int64_t value_stride, TYPE* output, int64_t output_stride,         \
                       const float* key_scales, int64_t key_scale_stride, const float* value_scales,                  \
                       int64_t value_scale_stride, const float* signs, float* log_sums, const float* sinks,           \
                       const int64_t* places, const int32_t* new_tokens, const FORMAT::type* pages,                   \
                       const int32_t* arena, const int32_t* starts, const int32_t* lengths, const int64_t* slots,     \
                       int64_t stride, int64_t first, int requests, int heads, int group, int head_dim,               \
                       int page_size, float scale, float cap) {                                                       \
    const Step<TYPE, FORMAT> step = {{query, query_stride}, {keys, key_stride}, {values, value_stride},               \
                                     {key_scales, key_scale_stride}, {value_scales, value_scale_stride}, signs,       \
                                     {output, output_stride}, log_sums, sinks, places, new_tokens,                    \
                                     {pages, page_size, arena, starts, lengths, slots, stride, first},                \
                                     {heads, group, head_dim}, scale, cap};                                           \
    prefill_fast(step, requests);                                                                                     \
  }

PREFILL_ATTENTION(prefill_attention_float32, float, Float32)
PREFILL_ATTENTION(prefill_attention_bfloat16, uint16_t, BFloat16)
PREFILL_ATTENTION(prefill_attention_float32_int8, float, Int8)
PREFILL_ATTENTION(prefill_attention_bfloat16_int8, uint16_t, Int8)
