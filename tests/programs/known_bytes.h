/* Bytes that a program can compute again, and choices that are the same for the same seed. */
#pragma once
#include <stdint.h>

/* A state to begin with. */
#define FIRST_STATE 88172645463325252ull

/* The state with which order `number` begins. */
static inline uint64_t state_of(uint64_t number)
{
	return FIRST_STATE + number * 0x9e3779b97f4a7c15ull;
}

/* The next choice below `limit`. */
static inline uint64_t below(uint64_t *state, uint64_t limit)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state % limit;
}

/* Word `at` of a page with this content, in this version. */
static inline uint64_t word(uint64_t content, uint64_t version, uint64_t at)
{
	uint64_t x = (content + 1) * 0x9e3779b97f4a7c15ull + version * 0xff51afd7ed558ccdull + at;
	x ^= x >> 29;
	return x * 0xbf58476d1ce4e5b9ull;
}
