// One pass from the slab to vLLM's CPU cache: gather, unpack, rotate, transpose and write.
//
// The cache layout is the one that vLLM 0.32 calls "vec" (csrc/cpu/cpu_attn_vec.hpp): each block of
// each head holds keys as [head_dim, block_size], then values as [block_size, head_dim]. Sixteen
// consecutive slots are one cache line of a key's dimension, so they are done together and written
// past the processor's caches: a normal store would first read every line that it replaces.
//
// Built by native.py with -ffp-contract=off: which products are fused is chosen by `fused` alone,
// because the result has to equal the model's own rotary kernel bit for bit.

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kLine = 16;  // floats in a cache line
constexpr int64_t kMaxHeadDim = 512;

typedef float Vec __attribute__((vector_size(32)));

inline Vec load(const float* from) {
  Vec value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline Vec fused_multiply_add(Vec a, Vec b, Vec c) {
#if defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  Vec result;
  for (int i = 0; i < 8; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return result;
#endif
}

// a*b + c*d; `kFused` is the product that is not rounded by itself (0: both are).
template <int kFused>
inline Vec sum_of_products(Vec a, Vec b, Vec c, Vec d) {
  if constexpr (kFused == 1) return fused_multiply_add(a, b, c * d);
  if constexpr (kFused == 2) return fused_multiply_add(c, d, a * b);
  return a * b + c * d;
}

inline void transpose(Vec (&r)[8]) {
  Vec a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = __builtin_shufflevector(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    b[i + 2] = __builtin_shufflevector(a[i + 1], a[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    b[i + 3] = __builtin_shufflevector(a[i + 1], a[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// One aligned cache line, past the caches where the machine can.
inline void stream_line(float* to, const float* from) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, _mm512_loadu_ps(from));
#elif defined(__AVX__)
  _mm256_stream_ps(to, _mm256_loadu_ps(from));
  _mm256_stream_ps(to + 8, _mm256_loadu_ps(from + 8));
#else
  std::memcpy(to, from, kLine * sizeof(float));
#endif
}

}  // namespace

extern "C" {

// All arrays are the caller's and only read, except the caches. Strides of the slab count bytes, all
// others elements.
struct Job {
  const uint8_t* slab;
  int64_t row_stride, layer_stride, head_stride, value_offset;  // value_offset: key to value
  int64_t kind;            // of the slab: float32, int8 or fp8 (e4m3)
  int64_t scale_offset;    // of quantised rows: from a head to its scales [layers, 2], bfloat16
  const float* powers;     // of quantised keys: [layers of the slab, heads, head_dim]
  int64_t num_heads, head_dim, rotary_dim, block_size;
  const float* cos_sin;  // [positions, rotary_dim]: cosines, then sines
  int64_t num_layers;
  const int64_t* layers;  // layer numbers in the slab
  float* const* caches;   // first block of each layer
  const int64_t* block_strides;
  const int64_t* head_strides;
  int64_t num_tokens;
  const int64_t* rows;
  const int64_t* positions;
  const int64_t* slots;
  int64_t num_units;       // units[i] .. units[i + 1]: tokens of one cache line of slots
  const int64_t* units;
  int64_t fused;
  int64_t num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, or null
  int64_t next;            // shared by the threads; 0 at the start
};

}

namespace {

struct Tile {
  alignas(64) float keys[kMaxHeadDim * kLine];  // [head_dim, 16]
};

struct Unpacked {
  alignas(64) float keys[kLine * kMaxHeadDim];  // [16, head_dim]
  alignas(64) float values[kLine * kMaxHeadDim];
};

enum Kind { kFloat = 0, kInt8 = 1, kFp8 = 2 };

template <int kKind>
inline float decode(uint8_t code) {
  if constexpr (kKind == kInt8) return static_cast<float>(static_cast<int8_t>(code));
  // e4m3: the same fields as a float's with an exponent 120 smaller, without one too. A product
  // instead of a choice between the two, so that the compiler makes vectors of it.
  const uint32_t code32 = code;
  const uint32_t bits = (code32 & 0x7f) << 20 | (code32 & 0x80) << 24;
  float small;
  std::memcpy(&small, &bits, sizeof(small));
  return small * 0x1p120f;
}

inline float scale_at(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return scale;
}

// Exact: code, scale and power have so few bits that no product is rounded.
template <int kKind>
void unpack(const Job& job, const uint8_t* const* rows, int64_t count, int64_t layer, int64_t head,
            Unpacked& out) {
  const float* powers = job.powers + (layer * job.num_heads + head) * job.head_dim;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* start = rows[i] + head * job.head_stride;
    const uint8_t* keys = start + layer * job.layer_stride;
    const uint8_t* values = keys + job.value_offset;
    const float key_scale = scale_at(start + job.scale_offset + layer * 4);
    const float value_scale = scale_at(start + job.scale_offset + layer * 4 + 2);
    float* key_out = out.keys + i * job.head_dim;
    float* value_out = out.values + i * job.head_dim;
    for (int64_t d = 0; d < job.head_dim; ++d)
      key_out[d] = decode<kKind>(keys[d]) * key_scale * powers[d];
    for (int64_t d = 0; d < job.head_dim; ++d) value_out[d] = decode<kKind>(values[d]) * value_scale;
  }
}

template <int kFused>
void rotate_into(const Job& job, const float* const* keys, const float* const* angles, Tile& tile,
                 int64_t first) {
  const int64_t half = job.rotary_dim / 2;
  for (int64_t d = 0; d < half; d += 8) {
    Vec low[8], high[8];
    for (int i = 0; i < 8; ++i) {
      const Vec x = load(keys[first + i] + d), y = load(keys[first + i] + half + d);
      const Vec cosine = load(angles[first + i] + d), sine = load(angles[first + i] + half + d);
      low[i] = sum_of_products<kFused>(x, cosine, -y, sine);
      high[i] = sum_of_products<kFused>(y, cosine, x, sine);
    }
    transpose(low);
    transpose(high);
    for (int i = 0; i < 8; ++i) {
      std::memcpy(tile.keys + (d + i) * kLine + first, &low[i], sizeof(Vec));
      std::memcpy(tile.keys + (half + d + i) * kLine + first, &high[i], sizeof(Vec));
    }
  }
  for (int64_t d = job.rotary_dim; d < job.head_dim; d += 8) {
    Vec plain[8];
    for (int i = 0; i < 8; ++i) plain[i] = load(keys[first + i] + d);
    transpose(plain);
    for (int i = 0; i < 8; ++i)
      std::memcpy(tile.keys + (d + i) * kLine + first, &plain[i], sizeof(Vec));
  }
}

template <int kFused, int kKind>
void write_unit(const Job& job, int64_t unit, int64_t first_layer, int64_t last_layer) {
  const int64_t begin = job.units[unit], count = job.units[unit + 1] - begin;
  const int64_t slot = job.slots[begin];
  const int64_t block = slot / job.block_size, offset = slot % job.block_size;
  const uint8_t* rows[kLine];
  const float* angles[kLine];
  for (int64_t i = 0; i < kLine; ++i) {
    // A short unit repeats its last token; what that gives is not written.
    const int64_t token = begin + (i < count ? i : count - 1);
    rows[i] = job.slab + job.rows[token] * job.row_stride;
    angles[i] = job.cos_sin + job.positions[token] * job.rotary_dim;
  }
  Tile tile;
  const int64_t half_block = job.block_size * job.head_dim;
  constexpr int64_t kItemsInLine = kKind == kFloat ? kLine : 4 * kLine;
  for (int64_t n = first_layer; n < last_layer; ++n) {
    const int64_t layer = job.layers[n] * job.layer_stride;
    for (int64_t head = 0; head < job.num_heads; ++head) {
      const uint8_t* codes[kLine];
      for (int64_t i = 0; i < kLine; ++i) codes[i] = rows[i] + layer + head * job.head_stride;
      float* target = job.caches[n] + block * job.block_strides[n] + head * job.head_strides[n];
      // A fact's layers lie one after the other, but sixteen tokens at once are more streams than
      // the processor follows by itself: read the next layer's part of this head ahead.
      if (n + 1 < last_layer) {
        const int64_t ahead = (job.layers[n + 1] - job.layers[n]) * job.layer_stride;
        for (int64_t i = 0; i < count; ++i)
          for (int64_t d = 0; d < job.head_dim; d += kItemsInLine) {
            const int64_t byte = 64 * d / kItemsInLine;
            __builtin_prefetch(codes[i] + ahead + byte, 0, 2);
            __builtin_prefetch(codes[i] + ahead + job.value_offset + byte, 0, 2);
          }
      }
      const float* keys[kLine];
      const float* values[kLine];
      Unpacked plain;
      if constexpr (kKind != kFloat)
        unpack<kKind>(job, rows, count, job.layers[n], head, plain);
      for (int64_t i = 0; i < kLine; ++i) {
        const int64_t token = i < count ? i : count - 1;
        if constexpr (kKind == kFloat) {
          keys[i] = reinterpret_cast<const float*>(codes[i]);
          values[i] = reinterpret_cast<const float*>(codes[i] + job.value_offset);
        } else {
          keys[i] = plain.keys + token * job.head_dim;
          values[i] = plain.values + token * job.head_dim;
        }
      }
      rotate_into<kFused>(job, keys, angles, tile, 0);
      rotate_into<kFused>(job, keys, angles, tile, 8);
      float* key_target = target + offset;
      if (count == kLine) {
        for (int64_t d = 0; d < job.head_dim; ++d)
          stream_line(key_target + d * job.block_size, tile.keys + d * kLine);
      } else {
        for (int64_t d = 0; d < job.head_dim; ++d)
          std::memcpy(key_target + d * job.block_size, tile.keys + d * kLine,
                      count * sizeof(float));
      }
      float* value_target = target + half_block + offset * job.head_dim;
      for (int64_t i = 0; i < count; ++i)
        for (int64_t d = 0; d < job.head_dim; d += kLine)
          stream_line(value_target + i * job.head_dim + d, values[i] + d);
    }
  }
}

template <int kFused, int kKind>
void run(Job& job, int64_t chunks) {
  const int64_t items = job.num_units * chunks;
  while (true) {
    const int64_t item = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (item >= items) break;
    const int64_t chunk = item % chunks;
    write_unit<kFused, kKind>(job, item / chunks, job.num_layers * chunk / chunks,
                              job.num_layers * (chunk + 1) / chunks);
  }
#if defined(__AVX__)
  _mm_sfence();  // streamed lines become visible before the caller goes on
#endif
}

template <int kKind>
void run_kind(Job& job, int64_t chunks) {
  switch (job.fused) {
    case 1: return run<1, kKind>(job, chunks);
    case 2: return run<2, kKind>(job, chunks);
    default: return run<0, kKind>(job, chunks);
  }
}

void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  // Few tokens on many threads: the layers are shared out too.
  int64_t chunks = job.num_units ? (4 * job.num_threads - 1) / job.num_units + 1 : 1;
  if (job.num_threads == 1 || chunks < 1) chunks = 1;
  if (chunks > job.num_layers) chunks = job.num_layers;
  switch (job.kind) {
    case kInt8: return run_kind<kInt8>(job, chunks);
    case kFp8: return run_kind<kFp8>(job, chunks);
    default: return run_kind<kFloat>(job, chunks);
  }
}

}  // namespace

extern "C" void inferscale_write(Job* job) {
  job->next = 0;
  if (job->parallel && job->num_threads > 1)
    job->parallel(work, job, static_cast<unsigned>(job->num_threads), 0);
  else
    work(job);
}

extern "C" int64_t inferscale_job_bytes() { return sizeof(Job); }
