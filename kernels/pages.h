// Where things lie in a page of T: keys [head_dim][page_size], scales of keys and of values [page_size] where T has
// scales, values [page_size][head_dim]. Distances are in elements.
#pragma once

#include "vectors.h"

namespace {

template <class T>
struct PageLayout {
  int64_t page_size, head_dim;
  int64_t elements() const { return 2 * page_size * (head_dim + T::SCALE); }
  int64_t key_scales() const { return page_size * head_dim; }
  int64_t value_scales() const { return page_size * (head_dim + T::SCALE); }
  int64_t values() const { return page_size * (head_dim + 2 * T::SCALE); }
};

// Write an entry into its page.
template <class T>
void store(const typename T::type* key, const typename T::type* value, typename T::type* page, int entry,
           PageLayout<T> layout) {
  for (int d = 0; d < layout.head_dim; ++d) page[d * layout.page_size + entry] = key[d];
  std::memcpy(page + layout.values() + entry * layout.head_dim, value, layout.head_dim * sizeof *value);
}

template <class T>
void store_scales(float key, float value, typename T::type* page, int entry, PageLayout<T> layout) {
  std::memcpy(page + layout.key_scales() + entry * T::SCALE, &key, sizeof key);
  std::memcpy(page + layout.value_scales() + entry * T::SCALE, &value, sizeof value);
}

}  // namespace
