// Attention of one new token per request over ragged pages, which first take in the token's key and value.
//
// A sequence is one (request, KV head): its pages hold entries of this head only, and its query rows are the
// query heads that share the head. A page is its keys, transposed, then its values:
//   keys [head_dim][page_size], values [page_size][head_dim].
//
// Pages are read once, each from its first byte to its last: neighbouring pages of a row then are one stream,
// which the hardware fetches ahead. Reading the keys of several pages first, then their values, is half as fast.
// Everything is computed in fp32, whatever the pages hold. Sequences are cut at fixed lengths, so a result depends
// neither on the rest of the batch nor on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#ifndef LANES
#error "LANES is the number of fp32 numbers in a vector register; kernels/processor.py says how many there are"
#endif
constexpr int BLOCK = 2 * LANES;  // entries or dims handled together; page_size and head_dim are multiples of it
constexpr int CUT = 2048;         // entries of a sequence that one thread takes at a time
constexpr float LOWEST = -1e30f;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

template <class V>
V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Elements of a page. block() reads BLOCK of them as fp32, and place() tells where in (low, high) each went.
struct Float32 {
  typedef float type;
  static void block(const float* from, Floats& low, Floats& high) {
    low = load<Floats>(from);
    high = load<Floats>(from + LANES);
  }
  static int place(int i) { return i; }
  static float value(float element) { return element; }
  static float element(float value) { return value; }
};

struct BFloat16 {
  typedef uint16_t type;
  // A bfloat16 is the upper half of a float, so even and odd elements apart take one operation each.
  static void block(const uint16_t* from, Floats& low, Floats& high) {
    const Words pairs = load<Words>(from);
    low = (Floats)(pairs << 16);
    high = (Floats)(pairs & 0xffff0000u);
  }
  static int place(int i) { return i % 2 * LANES + i / 2; }
  static float value(uint16_t element) {
    const uint32_t bits = (uint32_t)element << 16;
    return load<float>(&bits);
  }
  static uint16_t element(float value) {  // the nearest, of two the even one
    const uint32_t bits = load<uint32_t>(&value);
    return value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
  }
};

struct Shape {
  int group, head_dim, page_size;
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

// scores[r][place(t)] = query[r] . key t, for one block of entries.
template <class T, int ROWS, bool FETCH>
void score(const typename T::type* keys, const float* query, Shape shape, float* scores, int64_t next) {
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
  for (int r = 0; r < ROWS; ++r) std::memcpy(scores + r * shape.page_size, sums[r], sizeof sums[r]);
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

// Softmax-weighted sums over some entries, not yet divided, of `group` rows.
struct Part {
  float *largest, *sum, *out;  // [group], [group], [group][head_dim]
};

// One page, for at most four query rows: as many as the registers hold.
template <class T, int ROWS, bool FETCH>
void attend_page(const typename T::type* page, int entries, const float* query, Shape shape, float* scores,
                 Part part, int64_t next) {
  const int padded = (entries + BLOCK - 1) / BLOCK * BLOCK;
  for (int t = 0; t < entries; t += BLOCK) score<T, ROWS, FETCH>(page + t, query, shape, scores + t, next);
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
      std::memcpy(s + t, &weights, sizeof weights);
      sums += weights;
    }
    for (int lane = 0; lane < LANES; ++lane) part.sum[r] += sums[lane];
  }
  const auto* values = page + shape.page_size * shape.head_dim;
  for (int t = 0; t < entries; t += BLOCK)
    add<T, ROWS, FETCH>(values + t * shape.head_dim, scores + t, std::min(BLOCK, entries - t), shape, part.out, next);
}

// One page, for all query rows; the page `next` elements further on is fetched meanwhile.
template <class T, bool FETCH>
void attend_rows(const typename T::type* page, int entries, const float* query, Shape shape, float* scores,
                 Part part, int64_t next) {
  for (int r = 0; r < shape.group;) {
    const float* q = query + r * shape.head_dim;
    const Part rows = {part.largest + r, part.sum + r, part.out + r * shape.head_dim};
    switch (std::min(shape.group - r, 4)) {
      case 1: attend_page<T, 1, FETCH>(page, entries, q, shape, scores, rows, next); r += 1; break;
      case 2: attend_page<T, 2, FETCH>(page, entries, q, shape, scores, rows, next); r += 2; break;
      case 3: attend_page<T, 3, FETCH>(page, entries, q, shape, scores, rows, next); r += 3; break;
      default: attend_page<T, 4, FETCH>(page, entries, q, shape, scores, rows, next); r += 4;
    }
  }
}

template <class T>
void attend(const typename T::type* pages, const int32_t* table, int first, int last, const float* query,
            Shape shape, float* scores, Part part) {
  const int size = shape.page_size, dim = shape.head_dim;
  const int64_t page_elements = 2 * (int64_t)size * dim;
  std::fill_n(part.largest, shape.group, LOWEST);
  std::fill_n(part.sum, shape.group, 0.0f);
  std::fill_n(part.out, shape.group * dim, 0.0f);
  for (int start = first; start < last; start += size) {
    const int32_t* id = table + start / size;
    const auto* page = pages + *id * page_elements;
    const int entries = std::min(size, last - start);
    // A neighbour is fetched by the hardware, which does not see a jump coming.
    const int64_t jump = start + size < last ? id[1] - id[0] : 1;
    if (jump == 1)
      attend_rows<T, false>(page, entries, query, shape, scores, part, 0);
    else
      attend_rows<T, true>(page, entries, query, shape, scores, part, jump * page_elements);
  }
}

// total = total + next
void merge(Part total, Part next, Shape shape) {
  for (int r = 0; r < shape.group; ++r) {
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

template <class T>
struct Step {
  Tokens<const typename T::type> query, keys, values;
  Tokens<typename T::type> output;
  const int64_t* tokens;  // of each request, its row in the matrices; null: the request's own number
  int64_t token(int request) const { return tokens ? tokens[request] : request; }
};

// Write an entry into its page.
template <class E>
void store(const E* key, const E* value, E* page, int entry, Shape shape) {
  for (int d = 0; d < shape.head_dim; ++d) page[d * shape.page_size + entry] = key[d];
  std::memcpy(page + (shape.page_size + entry) * shape.head_dim, value, shape.head_dim * sizeof *value);
}

struct Item {
  int request, head, first, last;
  bool newest;  // whether it holds the entry that the step adds
};

template <class T>
void decode(const Step<T>& step, typename T::type* pages, const Rows& rows, int requests, int heads, Shape shape,
            float scale) {
  const int group = shape.group, dim = shape.head_dim, size = shape.page_size;
  const int cut = std::max(CUT / size, 1) * size;
  const int64_t page_elements = 2 * (int64_t)size * dim;
  std::vector<Item> items;
  for (int i = 0; i < requests; ++i)
    for (int h = 0; h < heads; ++h) {
      const int length = rows.lengths[rows.slots[i] * rows.stride + rows.first + h];
      for (int first = 0; first < length; first += cut)
        items.push_back({i, h, first, std::min(first + cut, length), first + cut >= length});
    }
  const int count = items.size(), floats = group * (dim + 2);
  std::vector<float> parts((size_t)count * floats);
  auto part = [&](int i) {
    float* from = parts.data() + (size_t)i * floats;
    return Part{from, from + group, from + 2 * group};
  };
#pragma omp parallel
  {
    std::vector<float> scaled(group * dim), scores(std::min(group, 4) * size);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; ++i) {
      const Item item = items[i];
      const int64_t token = step.token(item.request);
      const int32_t* table =
          rows.arena + rows.starts[rows.slots[item.request] * rows.stride + rows.first + item.head];
      if (item.newest) {
        const int entry = item.last - 1, own = item.head * dim;
        store(step.keys.head(token, own), step.values.head(token, own), pages + table[entry / size] * page_elements,
              entry % size, shape);
      }
      const auto* q = step.query.head(token, item.head * group * dim);
      for (int d = 0; d < group * dim; ++d) scaled[d] = scale * T::value(q[d]);
      attend<T>(pages, table, item.first, item.last, scaled.data(), shape, scores.data(), part(i));
    }
#pragma omp for schedule(static)
    for (int i = 0; i < count; ++i) {
      if (items[i].first) continue;  // the first part of a sequence takes the others in
      const Part total = part(i);
      for (int j = i + 1; j < count && items[j].first; ++j) merge(total, part(j), shape);
      auto* to = step.output.head(step.token(items[i].request), items[i].head * group * dim);
      for (int r = 0; r < group; ++r)
        for (int d = r * dim; d < (r + 1) * dim; ++d)
          to[d] = T::element(total.out[d / BLOCK * BLOCK + T::place(d % BLOCK)] / total.sum[r]);
    }
  }
}

}  // namespace

// query, output: [tokens, heads * group, head_dim]; keys, values: [tokens, heads, head_dim]; their strides are in
// elements from token to token. pages: [pages, 2 * page_size * head_dim]. starts, lengths: [slots, stride], all
// lengths of the batch positive, the new entry included.
#define DECODE_ATTENTION(NAME, TYPE)                                                                              \
  extern "C" void NAME(const TYPE::type* query, int64_t query_stride, const TYPE::type* keys, int64_t key_stride, \
                       const TYPE::type* values, int64_t value_stride, TYPE::type* output, int64_t output_stride, \
                       const int64_t* tokens, TYPE::type* pages, const int32_t* arena, const int32_t* starts,     \
                       const int32_t* lengths, const int64_t* slots, int64_t stride, int64_t first, int requests, \
                       int heads, int group, int head_dim, int page_size, float scale) {                          \
    decode<TYPE>({{query, query_stride}, {keys, key_stride}, {values, value_stride}, {output, output_stride},     \
                  tokens},                                                                                        \
                 pages, {arena, starts, lengths, slots, stride, first}, requests, heads,                          \
                 {group, head_dim, page_size}, scale);                                                            \
  }

DECODE_ATTENTION(decode_attention_float32, Float32)
DECODE_ATTENTION(decode_attention_bfloat16, BFloat16)
