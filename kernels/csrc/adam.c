/* Adam over split master weights: one pass over memory commits a step, previews one, or both.
 *
 * A master weight is bits(upper) << 16 plus the signed remainder `lower`. The order of operations
 * is that of torch's fused CPU kernel in its vector body, and every fused multiply-add is written
 * out: compile with -ffp-contract=off, and the bits are the same for every instruction set.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "pool.h"

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* Elements a thread claims at a time; also the unit of the sum of squares. */
enum { BLOCK = 1 << 16 };
/* Elements committed, then previewed while they are in the first-level cache. So few that the
 * divisions of a preview overlap the loads of the next tile: 0.63 Gparam/s against 0.53 at 1024. */
enum { TILE = 1 << 7 };
/* Elements by which memory is asked for ahead: the hardware stops at the end of every page. One
 * thread does 11 to 15 % more with it; 1024 is as good, 2048 less. */
enum { AHEAD = 1 << 9 };
/* Partial sums of squares in a block. */
enum { LANES = 256 };

typedef struct {
    uint16_t *upper;
    int16_t *lower;
    void *m, *v;
    int64_t length;
    int32_t moments_are_bf16; /* flags are 0 or 1 */
} State;

typedef struct {
    const void *grad;
    int32_t grad_is_fp32;
    float scale;        /* of the gradient */
    int32_t is_l2;      /* weight decay is added to the gradient (l2), else scales the weight */
    float m_weight;     /* 1 - beta1 */
    float v_decay;      /* beta2 */
    float v_weight;     /* 1 - beta2 */
    float eps;
    float weight_scale; /* 1 - lr * weight_decay */
    float l2;           /* weight_decay */
    float step_size;    /* -lr / (1 - beta1^t) */
    float v_correction; /* sqrt(1 - beta2^t) */
    float v_reciprocal; /* 1 / v_correction */
} Update;

typedef struct {
    State state;
    const Update *commit, *preview; /* either may be NULL */
    uint16_t *wire;
} Pass;

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float join(uint16_t upper, int16_t lower) {
    return from_bits(((uint32_t)upper << 16) + (uint32_t)(int32_t)lower);
}

/* Half away from zero. Every NaN becomes one: rounding could carry a payload into the sign. */
INLINE uint16_t round_to_bf16(uint32_t bits) {
    uint16_t rounded = (uint16_t)((bits + 0x8000u) >> 16);
    return (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)0x7fc0 : rounded;
}

INLINE int16_t remainder_of(uint32_t bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u ? (int16_t)0 : (int16_t)(uint16_t)bits;
}

INLINE float load(const void *values, int64_t i, int is_fp32) {
    return is_fp32 ? ((const float *)values)[i] : join(((const uint16_t *)values)[i], 0);
}

/* root / k.v_correction, correctly rounded, without the divider that the root and the step's own
 * division keep busy. The reciprocal is correctly rounded and the first correction leaves an error
 * below one unit of the last place, so the second one's result is the quotient.
 * Source: Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000
 * processor"; no root is so small that a remainder underflows. */
INLINE float corrected(float root, Update k) {
#ifdef __FMA__
    float near = root * k.v_reciprocal;
    float nearer = fmaf(fmaf(-near, k.v_correction, root), k.v_reciprocal, near);
    float quotient = fmaf(fmaf(-nearer, k.v_correction, root), k.v_reciprocal, nearer);
    return near > FLT_MAX ? near : quotient; /* infinity has no remainder */
#else
    return root / k.v_correction;
#endif
}

INLINE void store_moment(void *values, int64_t i, int is_bf16, float value) {
    if (is_bf16)
        ((uint16_t *)values)[i] = round_to_bf16(to_bits(value));
    else
        ((float *)values)[i] = value;
}

/* One step of `length` elements, committed or only written to the wire. The flags are constants
 * wherever this is inlined. */
INLINE void update(uint16_t *restrict upper, int16_t *restrict lower, void *restrict m,
                   void *restrict v, const void *restrict grad, uint16_t *restrict wire,
                   int64_t length, Update k, int commits, int grad_is_fp32, int bf16, int is_l2,
                   int weight_is_small) {
    float lerp = weight_is_small ? k.m_weight : k.m_weight - 1.0f;
    for (int64_t i = 0; i < length; i++) {
        float p = join(upper[i], lower[i]);
        float g = load(grad, i, grad_is_fp32) * k.scale;
        if (is_l2) g = fmaf(p, k.l2, g);
        float m_old = load(m, i, !bf16), v_old = load(v, i, !bf16);
        float m_new = fmaf(lerp, g - m_old, weight_is_small ? m_old : g);
        float v_new = fmaf(k.v_weight * g, g, v_old * k.v_decay);
        float denominator = corrected(sqrtf(v_new), k) + k.eps;
        if (!is_l2) p = p * k.weight_scale;
        p = p + k.step_size * m_new / denominator;
        uint32_t bits = to_bits(p);
        if (commits) {
            upper[i] = round_to_bf16(bits);
            lower[i] = remainder_of(bits);
            store_moment(m, i, bf16, m_new);
            store_moment(v, i, bf16, v_new);
        } else {
            wire[i] = round_to_bf16(bits);
        }
    }
}

/* Choose the loop whose flags are constants. */
INLINE void choose(const Pass *pass, const Update *with, int64_t start, int64_t length,
                   int commits) {
    const State *s = &pass->state;
    int64_t moment_bytes = s->moments_are_bf16 ? 2 : 4;
    int64_t grad_bytes = with->grad_is_fp32 ? 4 : 2;
    int weight_is_small = fabsf(with->m_weight) < 0.5f;
    uint16_t *upper = s->upper + start, *wire = commits ? NULL : pass->wire + start;
    int16_t *lower = s->lower + start;
    void *m = (char *)s->m + start * moment_bytes, *v = (char *)s->v + start * moment_bytes;
    const void *grad = (const char *)with->grad + start * grad_bytes;
#define CASE(flags)                                                                              \
    case flags:                                                                                  \
        update(upper, lower, m, v, grad, wire, length, *with, commits, (flags) & 1,              \
               (flags) >> 1 & 1, (flags) >> 2 & 1, (flags) >> 3 & 1);                            \
        break;
    switch (with->grad_is_fp32 | s->moments_are_bf16 << 1 | with->is_l2 << 2 |
            weight_is_small << 3) {
        CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15)
    }
#undef CASE
}

static void commit_range(const Pass *pass, int64_t start, int64_t length) {
    choose(pass, pass->commit, start, length, 1);
}

static void preview_range(const Pass *pass, int64_t start, int64_t length) {
    choose(pass, pass->preview, start, length, 0);
}

INLINE int64_t within(int64_t start, int64_t size, int64_t end) {
    return start + size < end ? size : end - start;
}

INLINE void ask_for(const void *values, int64_t start, int64_t item_bytes) {
    const char *from = (const char *)values + start * item_bytes;
    for (int64_t at = 0; at < TILE * item_bytes; at += 64) __builtin_prefetch(from + at);
}

INLINE void ask_for_gradient(const Update *with, int64_t start) {
    if (with) ask_for(with->grad, start, with->grad_is_fp32 ? 4 : 2);
}

static void ask_for_tile(const Pass *pass, int64_t start) {
    const State *s = &pass->state;
    if (start + TILE > s->length) return;
    int64_t moment_bytes = s->moments_are_bf16 ? 2 : 4;
    ask_for(s->upper, start, 2);
    ask_for(s->lower, start, 2);
    ask_for(s->m, start, moment_bytes);
    ask_for(s->v, start, moment_bytes);
    ask_for_gradient(pass->commit, start);
    ask_for_gradient(pass->preview, start);
}

static void pass_block(const void *work, int64_t block) {
    const Pass *pass = work;
    int64_t start = block * BLOCK, length = within(start, BLOCK, pass->state.length);
    for (int64_t tile = start; tile < start + length; tile += TILE) {
        int64_t tile_length = within(tile, TILE, start + length);
        ask_for_tile(pass, tile + AHEAD);
        if (pass->commit) commit_range(pass, tile, tile_length);
        if (pass->preview) preview_range(pass, tile, tile_length);
    }
}

static int64_t num_blocks(int64_t length) { return (length + BLOCK - 1) / BLOCK; }

EXPORT void adam_pass(const State *state, const Update *commit, const Update *preview,
                      uint16_t *wire, int threads) {
    Pass pass = {*state, commit, preview, wire};
    parallel_for(pass_block, &pass, num_blocks(state->length), threads);
}

typedef struct {
    float *master;
    uint16_t *upper;
    int16_t *lower;
    int64_t length;
} Halves;

static void split_block(const void *work, int64_t block) {
    const Halves *h = work;
    int64_t start = block * BLOCK, length = within(start, BLOCK, h->length);
    const float *restrict master = h->master + start;
    uint16_t *restrict upper = h->upper + start;
    int16_t *restrict lower = h->lower + start;
    for (int64_t i = 0; i < length; i++) {
        uint32_t bits = to_bits(master[i]);
        upper[i] = round_to_bf16(bits);
        lower[i] = remainder_of(bits);
    }
}

static void join_block(const void *work, int64_t block) {
    const Halves *h = work;
    int64_t start = block * BLOCK, length = within(start, BLOCK, h->length);
    float *restrict master = h->master + start;
    const uint16_t *restrict upper = h->upper + start;
    const int16_t *restrict lower = h->lower + start;
    for (int64_t i = 0; i < length; i++) master[i] = join(upper[i], lower[i]);
}

EXPORT void adam_split(float *master, uint16_t *upper, int16_t *lower, int64_t length,
                       int threads) {
    Halves halves = {master, upper, lower, length};
    parallel_for(split_block, &halves, num_blocks(length), threads);
}

EXPORT void adam_join(float *master, uint16_t *upper, int16_t *lower, int64_t length,
                      int threads) {
    Halves halves = {master, upper, lower, length};
    parallel_for(join_block, &halves, num_blocks(length), threads);
}

typedef struct {
    const void *values;
    int32_t is_fp32;
    int64_t length;
    double *of_block;
} Squares;

/* A fixed number of lanes, folded in halves: the order is the same for every instruction set. */
INLINE double sum_squares(const void *values, int64_t length, int is_fp32) {
    double lane[LANES] = {0};
    int64_t row = 0;
    for (; row + LANES <= length; row += LANES)
        for (int j = 0; j < LANES; j++) {
            double x = load(values, row + j, is_fp32);
            lane[j] += x * x; /* the product of two floats is exact in double */
        }
    for (int j = 0; row + j < length; j++) {
        double x = load(values, row + j, is_fp32);
        lane[j] += x * x;
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    return lane[0];
}

static void squares_block(const void *work, int64_t block) {
    const Squares *s = work;
    int64_t start = block * BLOCK, length = within(start, BLOCK, s->length);
    s->of_block[block] = s->is_fp32
                             ? sum_squares((const float *)s->values + start, length, 1)
                             : sum_squares((const uint16_t *)s->values + start, length, 0);
}

EXPORT void adam_squares(const void *values, int is_fp32, int64_t length, double *of_block,
                         int threads) {
    Squares squares = {values, is_fp32, length, of_block};
    parallel_for(squares_block, &squares, num_blocks(length), threads);
}
