// Attention of one or a few new tokens per request over ragged pages, which first take in their keys and values.
//
// A sequence is one (request, KV head): its pages hold entries of this head only, and its query rows are, token by
// token, the query heads that share the head. pages.h says what a page is.
//
// Pages are read once, each from its first byte to its last: neighbouring pages of a row then are one stream,
// which the hardware fetches ahead. Reading the keys of several pages first, then their values, is half as fast.
// Everything is computed in fp32, whatever the pages hold. Sequences are cut at fixed lengths, so a result depends
// neither on the rest of the batch nor on the number of threads, nor on the tokens that come after it in the step.

#include <algorithm>
#include <cmath>
#include <vector>

#include "pages.h"
#include "rotation.h"

namespace {

constexpr int BLOCK = 2 * LANES;  // entries or dims handled together; page_size and head_dim are multiples of it
constexpr int CUT = 2048;         // entries of a sequence that one thread takes at a time

struct Shape {
  int rows, head_dim, page_size;  // rows: query rows that are handled
  template <class T>
  PageLayout<T> layout() const { return {page_size, head_dim}; }
};

// e^x for x <= 0, to about one unit in the last place; 0 below -87.
Floats exponential(Floats x) {
  const Floats lowest = Floats{} - 87.0f;
  const Floats bounded = x > lowest ? x : lowest;
  const Floats shifted = bounded * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const Floats n = shifted - 12582912.0f;
  const Floats r = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;
  Floats p = Floats{} + 1.9875691e-4f;
  p = p * r + 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 5.0000001e-1f;
  p = (p * r * r + r) + 1.0f;
  const Words power = ((Words)shifted + 127u) << 23;
  const Floats result = p * (Floats)power;
  return x > lowest ? result : Floats{};
}

// Bring a block into the cache.
template <class T>
void fetch(const typename T::type* block) {
  for (int i = 0; i < BLOCK; i += 64 / sizeof *block) __builtin_prefetch(block + i);
}

// Multiply a vector by the scales of its entries.
template <class T>
Floats scaled(Floats values, const typename T::type* scales) {
  return T::SCALE ? values * load<Floats>(scales) : values;
}

// scores[r][place(t)] = query[r] . key t, for one block of entries.
template <class T, int ROWS, bool FETCH>
void score(const typename T::type* keys, const typename T::type* scales, const float* query, Shape shape,
           float* scores, int64_t next) {
  Floats sums[ROWS][2] = {};
  for (int d = 0; d < shape.head_dim; ++d) {
    Floats low, high;
    if (FETCH) fetch<T>(keys + d * shape.page_size + next);
    T::block(keys + d * shape.page_size, low, high);
    for (int r = 0; r < ROWS; ++r) {
      const float q = query[r * shape.head_dim + d];
      sums[r][0] += q * low;
      sums[r][1] += q * high;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    sums[r][0] = scaled<T>(sums[r][0], scales);
    sums[r][1] = scaled<T>(sums[r][1], scales + LANES * T::SCALE);
    std::memcpy(scores + r * shape.page_size, sums[r], sizeof sums[r]);
  }
}

// out[r][place(d)] += sum over t of weights[r][place(t)] * values[t][d], for one block of entries and WIDTH of dims.
template <class T, int ROWS, int WIDTH, bool FETCH>
void add_dims(const typename T::type* values, const float* weights, int entries, Shape shape, float* out,
              int64_t next) {
  Floats sums[ROWS][2 * WIDTH];
  for (int r = 0; r < ROWS; ++r) std::memcpy(sums[r], out + r * shape.head_dim, sizeof sums[r]);
  for (int t = 0; t < entries; ++t) {
    const float* weight = weights + T::place(t);
    for (int w = 0; w < WIDTH; ++w) {
      Floats low, high;
      if (FETCH) fetch<T>(values + t * shape.head_dim + w * BLOCK + next);
      T::block(values + t * shape.head_dim + w * BLOCK, low, high);
      for (int r = 0; r < ROWS; ++r) {
        sums[r][2 * w] += weight[r * shape.page_size] * low;
        sums[r][2 * w + 1] += weight[r * shape.page_size] * high;
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) std::memcpy(out + r * shape.head_dim, sums[r], sizeof sums[r]);
}

template <class T, int ROWS, bool FETCH>
void add(const typename T::type* values, const float* weights, int entries, Shape shape, float* out, int64_t next) {
  int d = 0;
  for (; d + 2 * BLOCK <= shape.head_dim; d += 2 * BLOCK)
    add_dims<T, ROWS, 2, FETCH>(values + d, weights, entries, shape, out + d, next);
  if (d < shape.head_dim) add_dims<T, ROWS, 1, FETCH>(values + d, weights, entries, shape, out + d, next);
}

// Softmax-weighted sums over some entries, not yet divided, of some query rows.
struct Part {
  float *largest, *sum, *out;  // [rows], [rows], [rows][head_dim]
  Part from(int row, Shape shape) const { return {largest + row, sum + row, out + row * shape.head_dim}; }
};

// One page, for at most four query rows: as many as the registers hold.
template <class T, int ROWS, bool FETCH>
void attend_page(const typename T::type* page, int entries, const float* query, Shape shape, float* scores,
                 Part part, int64_t next) {
  const PageLayout<T> layout = shape.layout<T>();
  const auto *key_scales = page + layout.key_scales(), *value_scales = page + layout.value_scales();
  const int padded = (entries + BLOCK - 1) / BLOCK * BLOCK;
  for (int t = 0; t < entries; t += BLOCK)
    score<T, ROWS, FETCH>(page + t, key_scales + t * T::SCALE, query, shape, scores + t, next);
  for (int r = 0; r < ROWS; ++r) {
    float* s = scores + r * shape.page_size;
    for (int t = entries; t < padded; ++t) s[padded - BLOCK + T::place(t % BLOCK)] = LOWEST;
    Floats most = load<Floats>(s);
    for (int t = LANES; t < padded; t += LANES) {
      const Floats more = load<Floats>(s + t);
      most = more > most ? more : most;
    }
    float largest = part.largest[r];
    for (int lane = 0; lane < LANES; ++lane) largest = std::max(largest, most[lane]);
    if (largest > part.largest[r]) {
      const float shrink = std::exp(part.largest[r] - largest);
      part.largest[r] = largest;
      part.sum[r] *= shrink;
      for (int d = 0; d < shape.head_dim; ++d) part.out[r * shape.head_dim + d] *= shrink;
    }
    Floats sums = {};
    for (int t = 0; t < padded; t += LANES) {
      const Floats weights = exponential(load<Floats>(s + t) - largest);
      sums += weights;
      const Floats of_numbers = scaled<T>(weights, value_scales + t * T::SCALE);
      std::memcpy(s + t, &of_numbers, sizeof of_numbers);
    }
    for (int lane = 0; lane < LANES; ++lane) part.sum[r] += sums[lane];
  }
  const auto* values = page + layout.values();
  for (int t = 0; t < entries; t += BLOCK)
    add<T, ROWS, FETCH>(values + t * shape.head_dim, scores + t, std::min(BLOCK, entries - t), shape, part.out, next);
}

// One page, for all rows of the shape; the page `next` elements further on is fetched meanwhile.
template <class T, bool FETCH>
void attend_rows(const typename T::type* page, int entries, const float* query, Shape shape, float* scores,
                 Part part, int64_t next) {
  for (int r = 0; r < shape.rows;) {
    const float* q = query + r * shape.head_dim;
    const Part rows = part.from(r, shape);
    switch (std::min(shape.rows - r, 4)) {
      case 1: attend_page<T, 1, FETCH>(page, entries, q, shape, scores, rows, next); r += 1; break;
      case 2: attend_page<T, 2, FETCH>(page, entries, q, shape, scores, rows, next); r += 2; break;
      case 3: attend_page<T, 3, FETCH>(page, entries, q, shape, scores, rows, next); r += 3; break;
      default: attend_page<T, 4, FETCH>(page, entries, q, shape, scores, rows, next); r += 4;
    }
  }
}

// Where a sequence's entries are, and which of them a thread takes.
struct Span {
  const int32_t* table;
  int first, last;
  int length, tokens;  // of the sequence: all its entries, the last of which are those of the step's tokens
};

// One page that begins at entry `start`. A token sees the entries before it and its own.
template <class T, bool FETCH>
void attend_tokens(const typename T::type* page, int start, Span span, const float* query, Shape shape, float* scores,
                   Part part, int64_t next) {
  const int end = std::min(start + shape.page_size, span.last), seen_by_first = span.length - span.tokens + 1;
  if (end <= seen_by_first) {
    attend_rows<T, FETCH>(page, end - start, query, shape, scores, part, next);
    return;
  }
  const Shape of_token = {shape.rows / span.tokens, shape.head_dim, shape.page_size};
  for (int i = 0; i < span.tokens; ++i) {
    const int entries = std::min(end, seen_by_first + i) - start, row = i * of_token.rows;
    if (entries > 0)
      attend_rows<T, FETCH>(page, entries, query + row * shape.head_dim, of_token, scores, part.from(row, shape), next);
  }
}

template <class T>
void attend(const typename T::type* pages, Span span, const float* query, Shape shape, float* scores, Part part) {
  const int size = shape.page_size, dim = shape.head_dim;
  const int64_t page_elements = shape.layout<T>().elements();
  std::fill_n(part.largest, shape.rows, LOWEST);
  std::fill_n(part.sum, shape.rows, 0.0f);
  std::fill_n(part.out, shape.rows * dim, 0.0f);
  for (int start = span.first; start < span.last; start += size) {
    const int32_t* id = span.table + start / size;
    const auto* page = pages + *id * page_elements;
    // A neighbour is fetched by the hardware, which does not see a jump coming.
    const int64_t jump = start + size < span.last ? id[1] - id[0] : 1;
    if (jump == 1)
      attend_tokens<T, false>(page, start, span, query, shape, scores, part, 0);
    else
      attend_tokens<T, true>(page, start, span, query, shape, scores, part, jump * page_elements);
  }
}

// total = total + next
void merge(Part total, Part next, Shape shape) {
  for (int r = 0; r < shape.rows; ++r) {
    const float largest = std::max(total.largest[r], next.largest[r]);
    const float mine = std::exp(total.largest[r] - largest), other = std::exp(next.largest[r] - largest);
    total.largest[r] = largest;
    total.sum[r] = total.sum[r] * mine + next.sum[r] * other;
    for (int d = r * shape.head_dim; d < (r + 1) * shape.head_dim; ++d)
      total.out[d] = total.out[d] * mine + next.out[d] * other;
  }
}

// Where sequences are: the row of KV head h of the batch's request i is slots[i] * stride + first + h.
struct Rows {
  const int32_t *arena, *starts, *lengths;  // page ids; of each row, its first page's place there and its entries
  const int64_t* slots;
  int64_t stride, first;
};

// A matrix whose rows are tokens; the heads of a token lie side by side.
template <class E>
struct Tokens {
  E* data;
  int64_t stride;
  E* head(int64_t token, int64_t offset) const { return data + token * stride + offset; }
};

// Queries and output are of M, entries of T.
template <class M, class T>
struct Step {
  Tokens<const typename M::type> query;
  Tokens<const typename T::type> keys, values;
  Tokens<const float> key_scales, value_scales;  // of each token's heads, where T has scales
  const float* signs;                            // of the rotation of keys that have scales
  Tokens<typename M::type> output;
  const int64_t* places;      // of each token, its row in the matrices; null: the token's own number
  const int32_t* new_tokens;  // of each request; null: one each
  int64_t place(int token) const { return places ? places[token] : token; }
};

// A part of a sequence that one thread takes, and the step's tokens of its request.
struct Item {
  Span span;
  Shape shape;  // of all its query rows
  int head, first_token;
  size_t floats;  // where its sums are
  size_t end() const { return floats + (size_t)shape.rows * (shape.head_dim + 2); }
};

// The parts of all sequences, those of a sequence one after the other.
template <class M, class T>
std::vector<Item> divide(const Step<M, T>& step, const Rows& rows, int requests, int heads, Shape shape) {
  const int cut = std::max(CUT / shape.page_size, 1) * shape.page_size;
  std::vector<Item> items;
  int token = 0;
  for (int i = 0; i < requests; ++i) {
    const int tokens = step.new_tokens ? step.new_tokens[i] : 1;
    for (int h = 0; h < heads; ++h) {
      const int64_t row = rows.slots[i] * rows.stride + rows.first + h;
      const int length = rows.lengths[row];
      for (int first = 0; first < length; first += cut) {
        const Span span = {rows.arena + rows.starts[row], first, std::min(first + cut, length), length, tokens};
        const Shape all = {shape.rows * tokens, shape.head_dim, shape.page_size};
        items.push_back({span, all, h, token, items.empty() ? 0 : items.back().end()});
      }
    }
    token += tokens;
  }
  return items;
}

// Write those of the step's entries that are in a part.
template <class M, class T>
void store_new(const Step<M, T>& step, const Item& item, typename T::type* pages, Shape shape) {
  const Span& span = item.span;
  const PageLayout<T> layout = shape.layout<T>();
  const int before = span.length - span.tokens, own = item.head * shape.head_dim;
  for (int entry = std::max(span.first, before); entry < span.last; ++entry) {
    const int64_t place = step.place(item.first_token + entry - before);
    auto* page = pages + span.table[entry / shape.page_size] * layout.elements();
    store(step.keys.head(place, own), step.values.head(place, own), page, entry % shape.page_size, layout);
    if (T::SCALE)
      store_scales(*step.key_scales.head(place, item.head), *step.value_scales.head(place, item.head), page,
                   entry % shape.page_size, layout);
  }
}

// A sequence's queries in the order (token, head), scaled, as fp32, and rotated like keys. `shape` is of one token.
template <class M, class T>
void load_queries(const Step<M, T>& step, const Item& item, Shape shape, float scale, float* query) {
  const int width = shape.rows * shape.head_dim;
  for (int i = 0; i < item.span.tokens; ++i) {
    const auto* from = step.query.head(step.place(item.first_token + i), item.head * width);
    for (int d = 0; d < width; ++d) query[i * width + d] = scale * M::value(from[d]);
  }
  if (T::SCALE)
    for (int row = 0; row < item.shape.rows; ++row) rotate(query + row * shape.head_dim, shape.head_dim, step.signs);
}

template <class M, class T>
void write_output(const Step<M, T>& step, const Item& item, Shape shape, Part total) {
  const int dim = shape.head_dim;
  for (int i = 0; i < item.span.tokens; ++i) {
    auto* to = step.output.head(step.place(item.first_token + i), item.head * shape.rows * dim);
    const Part token = total.from(i * shape.rows, shape);
    for (int r = 0; r < shape.rows; ++r)
      for (int d = r * dim; d < (r + 1) * dim; ++d)
        to[d] = M::element(token.out[d / BLOCK * BLOCK + T::place(d % BLOCK)] / token.sum[r]);
  }
}

// `shape` is of one token.
template <class M, class T>
void decode(const Step<M, T>& step, typename T::type* pages, const Rows& rows, int requests, int heads, Shape shape,
            float scale) {
  const std::vector<Item> items = divide(step, rows, requests, heads, shape);
  const int count = items.size();
  int most_rows = 0;
  for (const Item& item : items) most_rows = std::max(most_rows, item.shape.rows);
  std::vector<float> parts(count ? items.back().end() : 0);
  auto part = [&](const Item& item) {
    float* from = parts.data() + item.floats;
    return Part{from, from + item.shape.rows, from + 2 * item.shape.rows};
  };
#pragma omp parallel
  {
    std::vector<float> query(most_rows * shape.head_dim), scores(std::min(most_rows, 4) * shape.page_size);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; ++i) {
      store_new(step, items[i], pages, shape);
      load_queries(step, items[i], shape, scale, query.data());
      attend<T>(pages, items[i].span, query.data(), items[i].shape, scores.data(), part(items[i]));
    }
#pragma omp for schedule(static)
    for (int i = 0; i < count; ++i) {
      if (items[i].span.first) continue;  // the first part of a sequence takes the others in
      const Part total = part(items[i]);
      for (int j = i + 1; j < count && items[j].span.first; ++j) merge(total, part(items[j]), items[i].shape);
      write_output(step, items[i], shape, total);
    }
  }
}

}  // namespace

// query, output: [tokens, heads * group, head_dim]; keys, values: [tokens, heads, head_dim], their scales [tokens,
// heads]; strides are in elements from token to token. pages.h says what pages are. starts, lengths: [slots, stride]; a
// length is at least its request's new_tokens, which are positive. places: [sum of new_tokens], all requests in turn.
#define DECODE_ATTENTION(NAME, MODEL, FORMAT)                                                                      \
  extern "C" void NAME(const MODEL::type* query, int64_t query_stride, const FORMAT::type* keys,                   \
                       int64_t key_stride, const FORMAT::type* values, int64_t value_stride, MODEL::type* output,  \
                       int64_t output_stride, const float* key_scales, int64_t key_scale_stride,                   \
                       const float* value_scales, int64_t value_scale_stride, const float* signs,                  \
                       const int64_t* places, const int32_t* new_tokens, FORMAT::type* pages,                      \
                       const int32_t* arena, const int32_t* starts, const int32_t* lengths, const int64_t* slots,  \
                       int64_t stride, int64_t first, int requests, int heads, int group, int head_dim,            \
                       int page_size, float scale) {                                                               \
    decode<MODEL, FORMAT>({{query, query_stride}, {keys, key_stride}, {values, value_stride},                      \
                           {key_scales, key_scale_stride}, {value_scales, value_scale_stride}, signs,              \
                           {output, output_stride}, places, new_tokens},                                           \
                          pages, {arena, starts, lengths, slots, stride, first}, requests, heads,                  \
                          {group, head_dim, page_size}, scale);                                                    \
  }

DECODE_ATTENTION(decode_attention_float32, Float32, Float32)
DECODE_ATTENTION(decode_attention_bfloat16, BFloat16, BFloat16)
DECODE_ATTENTION(decode_attention_float32_int8, Float32, Int8)
DECODE_ATTENTION(decode_attention_bfloat16_int8, BFloat16, Int8)
