// Attention of few queries over windows of codes, which are read where they lie: the twin of coded.py.
//
// R sequences times KV heads, W windows of w tokens, X queries of a KV head, D and E channels of keys and values,
// N = W * w. A byte holds codes j, j + P, j + 2 P and so on of a token, from its lowest bits up (see quant.py).

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// as in parts.py: finite, and less than any logit
#define HIDDEN -1.7e38f
// unpacking writes whole bytes of codes
#define PADDING 4

typedef struct {
    int64_t rows, windows, window, queries;
    int64_t key_size, key_bits, value_size, value_bits, rotated;
} Shape;

typedef uint8_t Bytes __attribute__((vector_size(8)));
typedef int32_t Integers __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));

static inline void unpack_planes(const uint8_t *restrict packed, int64_t bytes, const int bits, float *restrict codes) {
    const int mask = (1 << bits) - 1;
    int64_t j = 0;
    // eight bytes at a time: left to itself, a compiler wants more of them than a head has
    for (; j + 8 <= bytes; j += 8) {
        Bytes narrow;
        memcpy(&narrow, packed + j, sizeof narrow);
        const Integers wide = __builtin_convertvector(narrow, Integers);
        for (int plane = 0; plane < 8 / bits; plane++) {
            const Floats plain = __builtin_convertvector((wide >> (plane * bits)) & mask, Floats);
            memcpy(codes + plane * bytes + j, &plain, sizeof plain);
        }
    }
    for (; j < bytes; j++)
        for (int plane = 0; plane < 8 / bits; plane++)
            codes[plane * bytes + j] = (float)((packed[j] >> (plane * bits)) & mask);
}

// with the bits known to the compiler
static inline void unpack(const uint8_t *packed, int64_t bytes, int64_t bits, float *codes) {
    if (bits == 2) unpack_planes(packed, bytes, 2, codes);
    else if (bits == 4) unpack_planes(packed, bytes, 4, codes);
    else unpack_planes(packed, bytes, 8, codes);
}

static inline float dot(const float *restrict a, const float *restrict b, int64_t size) {
    float sum = 0;
    for (int64_t d = 0; d < size; d++) sum += a[d] * b[d];
    return sum;
}

// dequantize in place, then turn the first `rotated` channels, halves paired
static inline void restore(float *restrict key, const float *restrict scale, const float *restrict zero, int64_t size,
                           const float *restrict cosine, const float *restrict sine, int64_t rotated) {
    for (int64_t d = 0; d < size; d++) key[d] = key[d] * scale[d] + zero[d];
    const int64_t half = rotated / 2;
    float *restrict low = key, *restrict high = key + half;
    for (int64_t d = 0; d < half; d++) {
        const float first = low[d], second = high[d];
        low[d] = first * cosine[d] - second * sine[d];
        high[d] = second * cosine[d] + first * sine[d];
    }
}

static inline void add(float *restrict sum, const float *restrict value, float weight, int64_t size) {
    for (int64_t d = 0; d < size; d++) sum[d] += weight * value[d];
}

static void score(Shape s, const float *queries, const uint8_t *codes, const _Float16 *scales, const _Float16 *zeros,
                  const int32_t *positions, const uint8_t *dormant, const float *cosines, const float *sines, float *logits,
                  float *scratch) {
    const int64_t bytes = (s.key_size * s.key_bits + 7) / 8, tokens = s.windows * s.window;
    float *scale = scratch, *zero = scale + s.key_size, *key = zero + s.key_size;
    for (int64_t at = 0; at < s.windows; at++) {
        const int hidden = positions[at * s.window] < 0 || dormant[at];
        for (int64_t d = 0; d < s.key_size && !hidden; d++) {
            scale[d] = (float)scales[at * s.key_size + d];
            zero[d] = (float)zeros[at * s.key_size + d];
        }
        for (int64_t i = 0; i < s.window; i++) {
            const int64_t token = at * s.window + i, position = positions[token];
            if (!hidden) {
                unpack(codes + token * bytes, bytes, s.key_bits, key);
                restore(key, scale, zero, s.key_size, cosines + position * s.rotated, sines + position * s.rotated,
                        s.rotated);
            }
            for (int64_t x = 0; x < s.queries; x++)
                logits[x * tokens + token] = hidden ? HIDDEN : dot(queries + x * s.key_size, key, s.key_size);
        }
    }
}

static void sum_values(Shape s, const float *logits, const uint8_t *codes, const _Float16 *scales,
                       const _Float16 *zeros, float *output, float *logsums, float *scratch) {
    const int64_t bytes = (s.value_size * s.value_bits + 7) / 8, tokens = s.windows * s.window;
    float *total = scratch, *shift = total + s.queries, *largest = shift + s.queries, *value = largest + s.queries;
    float *weights = value + s.value_size + PADDING;
    for (int64_t x = 0; x < s.queries; x++) {
        float *restrict weight = weights + x * tokens;
        const float *restrict logit = logits + x * tokens;
        float most = HIDDEN, sum = 0;
        for (int64_t n = 0; n < tokens; n++) most = logit[n] > most ? logit[n] : most;
        // a loop of its own, which compilers turn into a vector of exponentials
        for (int64_t n = 0; n < tokens; n++) weight[n] = expf(logit[n] - most);
        for (int64_t n = 0; n < tokens; n++) sum += weight[n];
        largest[x] = most;
        total[x] = most > HIDDEN ? sum : 0;
        shift[x] = 0;
        for (int64_t d = 0; d < s.value_size; d++) output[x * s.value_size + d] = 0;
    }
    for (int64_t n = 0; n < tokens; n++) {
        if (logits[n] <= HIDDEN) continue;
        unpack(codes + n * bytes, bytes, s.value_bits, value);
        const float scale = (float)scales[n], zero = (float)zeros[n];
        for (int64_t x = 0; x < s.queries; x++) {
            const float weight = weights[x * tokens + n];
            shift[x] += weight * zero;
            add(output + x * s.value_size, value, weight * scale, s.value_size);
        }
    }
    for (int64_t x = 0; x < s.queries; x++) {
        // where everything is hidden, a part that counts for nothing
        logsums[x] = total[x] > 0 ? largest[x] + logf(total[x]) : HIDDEN;
        const float inverse = total[x] > 0 ? 1 / total[x] : 0;
        for (int64_t d = 0; d < s.value_size; d++)
            output[x * s.value_size + d] = (output[x * s.value_size + d] + shift[x]) * inverse;
    }
}

// 0, or 1 without memory
int read_coded(Shape s, const float *queries, const uint8_t *key_codes, const _Float16 *key_scales,
               const _Float16 *key_zeros, const uint8_t *value_codes, const _Float16 *value_scales,
               const _Float16 *value_zeros, const int32_t *positions, const uint8_t *dormant, const float *cosines,
               const float *sines, float *output, float *logsums, float *logits) {
    const int64_t tokens = s.windows * s.window;
    const int64_t key_bytes = (s.key_size * s.key_bits + 7) / 8, value_bytes = (s.value_size * s.value_bits + 7) / 8;
    const int64_t scoring = 3 * s.key_size + PADDING, summing = 3 * s.queries + s.value_size + PADDING;
    float *scratch = malloc(sizeof(float) * (scoring + summing + s.queries * tokens));
    if (!scratch) return 1;
    for (int64_t r = 0; r < s.rows; r++) {
        float *scores = logits + r * s.queries * tokens;
        score(s, queries + r * s.queries * s.key_size, key_codes + r * tokens * key_bytes,
              key_scales + r * s.windows * s.key_size, key_zeros + r * s.windows * s.key_size, positions + r * tokens,
              dormant + r * s.windows, cosines, sines, scores, scratch);
        sum_values(s, scores, value_codes + r * tokens * value_bytes, value_scales + r * tokens,
                   value_zeros + r * tokens, output + r * s.queries * s.value_size, logsums + r * s.queries, scratch);
    }
    free(scratch);
    return 0;
}
