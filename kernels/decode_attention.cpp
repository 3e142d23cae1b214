// Attention of one new token per sequence over ragged pages.
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

constexpr int LANES = 16;
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

// scores[r][place(t)] = query[r] . key t, for one block of entries.
template <class T, int ROWS>
void score(const typename T::type* keys, const float* query, Shape shape, float* scores) {
  Floats sums[ROWS][2] = {};
  for (int d = 0; d < shape.head_dim; ++d) {
    Floats low, high;
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
template <class T, int ROWS, int WIDTH>
void add_dims(const typename T::type* values, const float* weights, int entries, Shape shape, float* out) {
  Floats sums[ROWS][2 * WIDTH];
  for (int r = 0; r < ROWS; ++r) std::memcpy(sums[r], out + r * shape.head_dim, sizeof sums[r]);
  for (int t = 0; t < entries; ++t) {
    const float* weight = weights + T::place(t);
    for (int w = 0; w < WIDTH; ++w) {
      Floats low, high;
      T::block(values + t * shape.head_dim + w * BLOCK, low, high);
      for (int r = 0; r < ROWS; ++r) {
        sums[r][2 * w] += weight[r * shape.page_size] * low;
        sums[r][2 * w + 1] += weight[r * shape.page_size] * high;
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) std::memcpy(out + r * shape.head_dim, sums[r], sizeof sums[r]);
}

template <class T, int ROWS>
void add(const typename T::type* values, const float* weights, int entries, Shape shape, float* out) {
  int d = 0;
  for (; d + 2 * BLOCK <= shape.head_dim; d += 2 * BLOCK)
    add_dims<T, ROWS, 2>(values + d, weights, entries, shape, out + d);
  if (d < shape.head_dim) add_dims<T, ROWS, 1>(values + d, weights, entries, shape, out + d);
}

// Softmax-weighted sums over some entries, not yet divided, of `group` rows.
struct Part {
  float *largest, *sum, *out;  // [group], [group], [group][head_dim]
};

// One page, for at most four query rows: as many as the registers hold.
template <class T, int ROWS>
void attend_page(const typename T::type* page, int entries, const float* query, Shape shape, float* scores,
                 Part part) {
  const int padded = (entries + BLOCK - 1) / BLOCK * BLOCK;
  for (int t = 0; t < entries; t += BLOCK) score<T, ROWS>(page + t, query, shape, scores + t);
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
    add<T, ROWS>(values + t * shape.head_dim, scores + t, std::min(BLOCK, entries - t), shape, part.out);
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
    if (start + size < last && id[1] != id[0] + 1)
      for (int i = 0; i < page_elements; i += 64 / sizeof *page)
        __builtin_prefetch(pages + id[1] * page_elements + i);
    for (int r = 0; r < shape.group;) {
      const float* q = query + r * dim;
      const Part rows = {part.largest + r, part.sum + r, part.out + r * dim};
      switch (std::min(shape.group - r, 4)) {
        case 1: attend_page<T, 1>(page, entries, q, shape, scores, rows); r += 1; break;
        case 2: attend_page<T, 2>(page, entries, q, shape, scores, rows); r += 2; break;
        case 3: attend_page<T, 3>(page, entries, q, shape, scores, rows); r += 3; break;
        default: attend_page<T, 4>(page, entries, q, shape, scores, rows); r += 4;
      }
    }
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

struct Item {
  int sequence, first, last;
};

template <class T>
void decode(const typename T::type* query, typename T::type* output, const typename T::type* pages,
            const int32_t* lengths, const int32_t* tables, int64_t width, int sequences, Shape shape, float scale) {
  const int rows = shape.group, dim = shape.head_dim, cut = std::max(CUT / shape.page_size, 1) * shape.page_size;
  std::vector<Item> items;
  for (int i = 0; i < sequences; ++i)
    for (int first = 0; first < lengths[i]; first += cut) items.push_back({i, first, std::min(first + cut, lengths[i])});
  const int count = items.size(), floats = rows * (dim + 2);
  std::vector<float> parts((size_t)count * floats);
  auto part = [&](int i) {
    float* from = parts.data() + (size_t)i * floats;
    return Part{from, from + rows, from + 2 * rows};
  };
#pragma omp parallel
  {
    std::vector<float> scaled(rows * dim), scores(std::min(rows, 4) * shape.page_size);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; ++i) {
      const Item item = items[i];
      const auto* q = query + (int64_t)item.sequence * rows * dim;
      for (int d = 0; d < rows * dim; ++d) scaled[d] = scale * T::value(q[d]);
      attend<T>(pages, tables + item.sequence * width, item.first, item.last, scaled.data(), shape, scores.data(),
                part(i));
    }
#pragma omp for schedule(static)
    for (int i = 0; i < count; ++i) {
      if (items[i].first) continue;  // the first part of a sequence takes the others in
      const Part total = part(i);
      for (int j = i + 1; j < count && items[j].first; ++j) merge(total, part(j), shape);
      auto* to = output + (int64_t)items[i].sequence * rows * dim;
      for (int r = 0; r < rows; ++r)
        for (int d = r * dim; d < (r + 1) * dim; ++d)
          to[d] = T::element(total.out[d / BLOCK * BLOCK + T::place(d % BLOCK)] / total.sum[r]);
    }
  }
}

}  // namespace

// query, output: [sequences, group, head_dim]; pages: [pages, 2 * page_size * head_dim]; lengths: [sequences], all
// positive; tables: [sequences, width].
#define DECODE_ATTENTION(NAME, TYPE)                                                                              \
  extern "C" void NAME(const TYPE::type* query, TYPE::type* output, const TYPE::type* pages,                      \
                       const int32_t* lengths, const int32_t* tables, int64_t width, int sequences, int group,    \
                       int head_dim, int page_size, float scale) {                                                \
    decode<TYPE>(query, output, pages, lengths, tables, width, sequences, {group, head_dim, page_size}, scale);   \
  }

DECODE_ATTENTION(decode_attention_float32, Float32)
DECODE_ATTENTION(decode_attention_bfloat16, BFloat16)
