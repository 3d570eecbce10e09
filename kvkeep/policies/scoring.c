// One token taken in and one judged by each agent of a layer: the twin of Scorers.judge and static_priority for decoding.
//
// Rows are sequences, each with `agents` agents side by side. An agent's first layer is [size, width] with size = keys and
// values of a token; of its columns the first `hidden + memory` read the token that is judged, the others the one taken in.
// A memory holds [2 * memory, memory + 1] numbers, divided by exp(level).

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t rows, agents, key_size, value_size, turned, hidden, memory;
    // numbers of keys and values are of this type; from row to row, agent to agent and slot to slot there are so many
    int64_t type, key_row, key_agent, key_slot, value_row, value_agent, value_slot;
} Sizes;

typedef struct {
    const void *keys, *values;
    // of the token that is judged and of the one that is taken in, [rows, agents]: slots and positions
    const int64_t *asked_slots, *asked_positions, *new_slots, *new_positions;
    // of the layer's agents
    const float *frequencies, *weight, *bias, *norm, *last, *log_decay;
    float *held, *levels, *priorities;
} Arrays;

typedef struct {
    int64_t rows, agents, slots, row, agent;
} Places;

enum { FP32, BF16, FP16 };

// no exponential may overflow: what is compiled to be fast knows no infinity
static float silu(float x) { return x / (1 + expf(x > -80 ? -x : 80)); }

// cosines and sines of a position, which most agents share
typedef struct {
    int64_t position;
    float *cosines, *sines;
} Angles;

static void turn_to(int64_t position, int64_t half, const float *frequencies, Angles *at) {
    if (at->position == position) return;
    at->position = position;
    for (int64_t d = 0; d < half; d++) at->cosines[d] = cosf((float)position * frequencies[d]);
    for (int64_t d = 0; d < half; d++) at->sines[d] = sinf((float)position * frequencies[d]);
}

static void widen(const void *numbers, int64_t first, int64_t size, int64_t type, float *restrict wide) {
    if (type == FP32) {
        memcpy(wide, (const float *)numbers + first, sizeof(float) * size);
    } else if (type == BF16) {
        const uint16_t *narrow = (const uint16_t *)numbers + first;
        for (int64_t d = 0; d < size; d++) {
            const uint32_t bits = (uint32_t)narrow[d] << 16;
            memcpy(wide + d, &bits, sizeof bits);
        }
    } else {
        const _Float16 *narrow = (const _Float16 *)numbers + first;
        for (int64_t d = 0; d < size; d++) wide[d] = (float)narrow[d];
    }
}

// the key of a slot turned back to position 0, halves paired, and the value behind it
static void read_token(Sizes s, const Arrays *a, int64_t row, int64_t agent, int64_t slot, const Angles *at,
                       float *restrict token) {
    const int64_t half = s.turned / 2;
    widen(a->keys, row * s.key_row + agent * s.key_agent + slot * s.key_slot, s.key_size, s.type, token);
    widen(a->values, row * s.value_row + agent * s.value_agent + slot * s.value_slot, s.value_size, s.type,
          token + s.key_size);
    for (int64_t d = 0; d < half; d++) {
        const float low = token[d], high = token[half + d];
        token[d] = low * at->cosines[d] + high * at->sines[d];
        token[half + d] = high * at->cosines[d] - low * at->sines[d];
    }
}

// columns `first` to `last` of the first layer
static void layer(int64_t size, int64_t width, const float *token, const float *weight, const float *bias,
                  int64_t first, int64_t last, float *restrict out) {
    memcpy(out + first, bias + first, sizeof(float) * (last - first));
    for (int64_t f = 0; f < size; f++) {
        const float x = token[f];
        const float *restrict row = weight + f * width;
        for (int64_t c = first; c < last; c++) out[c] += x * row[c];
    }
}

static void softmax(const float *x, int64_t size, float sign, float *out) {
    float most = sign * x[0], sum = 0;
    for (int64_t i = 1; i < size; i++) most = sign * x[i] > most ? sign * x[i] : most;
    for (int64_t i = 0; i < size; i++) out[i] = expf(sign * x[i] - most);
    for (int64_t i = 0; i < size; i++) sum += out[i];
    for (int64_t i = 0; i < size; i++) out[i] /= sum;
}

static void features(const float *x, int64_t size, float *out) {
    softmax(x, size, 1, out);
    softmax(x, size, -1, out + size);
}

// C = f C + i k v, with everything divided by exp(level)
static void take_in(int64_t size, const float *keys, const float *values, float enter, float forget, float *restrict held,
                    float *level) {
    // log of a sigmoid
    const float stay = forget < 0 ? forget - log1pf(expf(forget)) : -log1pf(expf(-forget));
    const float kept = stay + *level, now = kept > enter ? kept : enter;
    const float old = expf(kept - now), fresh = expf(enter - now);
    for (int64_t p = 0; p < 2 * size; p++) {
        float *restrict row = held + p * (size + 1);
        const float weight = fresh * keys[p];
        for (int64_t m = 0; m < size; m++) row[m] = row[m] * old + weight * values[m];
        row[size] = row[size] * old + weight;
    }
    *level = now;
}

// what a query finds, normalised, through silu
static void find(int64_t size, const float *query, const float *held, const float *gain, const float *shift, float *found) {
    float total = 0, mean = 0, variance = 0;
    memset(found, 0, sizeof(float) * size);
    for (int64_t p = 0; p < 2 * size; p++) {
        const float *row = held + p * (size + 1);
        for (int64_t m = 0; m < size; m++) found[m] += query[p] * row[m];
        total += query[p] * row[size];
    }
    // nothing where there is no weight
    const float least = 1.17549435e-38f, inverse = 1 / (total > least ? total : least);
    for (int64_t m = 0; m < size; m++) mean += found[m] *= inverse;
    mean /= size;
    for (int64_t m = 0; m < size; m++) variance += (found[m] - mean) * (found[m] - mean);
    const float scale = 1 / sqrtf(variance / size + 1e-5f);
    for (int64_t m = 0; m < size; m++) found[m] = silu((found[m] - mean) * scale * gain[m] + shift[m]);
}

// 0, or 1 without memory
int judge(Sizes s, Arrays a) {
    const int64_t size = s.key_size + s.value_size, asked = s.hidden + s.memory;
    const int64_t width = asked + (s.memory ? 2 * s.memory + 2 : 0);
    const int64_t half = s.turned / 2;
    float *token = malloc(sizeof(float) * (size + width + 5 * s.memory + 4 * half));
    if (!token) return 1;
    float *out = token + size, *query = out + width, *keys = query + 2 * s.memory, *found = keys + 2 * s.memory;
    float *angles = found + s.memory;
    // no token has that position
    Angles late = {INT64_MIN, angles, angles + half}, now = {INT64_MIN, angles + 2 * half, angles + 3 * half};
    for (int64_t at = 0; at < s.rows * s.agents; at++) {
        const int64_t row = at / s.agents, agent = at % s.agents;
        const float *weight = a.weight + agent * size * width, *bias = a.bias + agent * width;
        const float *last = a.last + agent * asked, *norm = a.norm + agent * 2 * s.memory;
        float score = 0;
        turn_to(a.asked_positions[at], half, a.frequencies, &late);
        read_token(s, &a, row, agent, a.asked_slots[at], &late, token);
        layer(size, width, token, weight, bias, 0, asked, out);
        for (int64_t h = 0; h < s.hidden; h++) score += silu(out[h]) * last[h];
        if (s.memory) {
            float *held = a.held + at * 2 * s.memory * (s.memory + 1);
            // padding changes nothing
            if (a.new_positions[at] >= 0) {
                turn_to(a.new_positions[at], half, a.frequencies, &now);
                read_token(s, &a, row, agent, a.new_slots[at], &now, token);
                layer(size, width, token, weight, bias, asked, width, out);
                features(out + asked, s.memory, keys);
                take_in(s.memory, keys, out + asked + s.memory, out[width - 2], out[width - 1], held, a.levels + at);
            }
            features(out + s.hidden, s.memory, query);
            find(s.memory, query, held, norm, norm + s.memory, found);
            for (int64_t m = 0; m < s.memory; m++) score += found[m] * last[s.hidden + m];
        }
        a.priorities[at] = score - (float)a.asked_positions[at] * a.log_decay[agent];
    }
    free(token);
    return 0;
}

// the slot in which each agent has the token at a position, that of `others` where there is none
void find_slots(Places p, const int32_t *positions, const int64_t *wanted, const int64_t *others, int64_t *slots) {
    for (int64_t at = 0; at < p.rows * p.agents; at++) {
        const int32_t *held = positions + at / p.agents * p.row + at % p.agents * p.agent;
        slots[at] = others[at];
        for (int64_t n = 0; n < p.slots; n++)
            if (held[n] == wanted[at]) {
                slots[at] = n;
                break;
            }
    }
}
