"""Keys of random numbers: tuples of whole numbers mapped to seeds without collisions.

numpy pads the words of a SeedSequence with zeros up to four, and splits numbers
of 2^32 or more: [1, 2, 3] equals [1, 2, 3, 0], and [2^32 + 5] equals [5, 1].
Keys passed to numpy directly can therefore collide. This project makes every
SeedSequence with `seed_sequence`.
"""

import numpy as np

WORD = 1 << 32
# first number of the key of a corpus's sample order:
# two words, so four words with seed and epoch
# The number is the ASCII text "order", 5 bytes.
SAMPLE_ORDER = 0x6F72646572


def seed_sequence(*numbers: int) -> np.random.SeedSequence:
    """Return the SeedSequence of a key of whole numbers. No two keys share one."""
    return np.random.SeedSequence(key_words(*numbers))


def key_words(*numbers: int) -> list[int]:
    """Return the words of a key: a one-to-one function of the numbers, also after padding.

    Three numbers below 2^32 are their own words, and so is the key
    of a sample order. Any other key is the count of numbers,
    then for each number its sign, its count of words
    and its words: at least five words, which numpy does not pad.
    """
    numbers = tuple(int(number) for number in numbers)
    if len(numbers) == 3 and all(0 <= number < WORD for number in numbers[1:]):
        if numbers[0] == SAMPLE_ORDER:
            return [*_split_into_words(SAMPLE_ORDER), *numbers[1:]]  # four words, as numpy splits them
        # three numbers whose first two are the words of
        # SAMPLE_ORDER would collide with the key above
        if 0 <= numbers[0] < WORD and list(numbers[:2]) != _split_into_words(SAMPLE_ORDER):
            return list(numbers)
    words = [len(numbers)]
    for number in numbers:
        # Example: (5,) -> [1, 2, 5, 0, 1]: one
        # number; one word, positive; 5; the end.
        # Each prefix determines how many words follow.
        digits = _split_into_words(abs(number))
        words += [2 * len(digits) + (number < 0), *digits]  # one word for both length and sign
    # a long key has at least five words, so numpy does not pad it; the last one is 1
    return [*words, *[0] * (3 - len(words)), 0, 1]


def _split_into_words(number: int) -> list[int]:
    """Return the digits of a number >= 0 in base 2^32, lowest first; an empty list for 0."""
    words = []
    while number:
        words.append(number % WORD)
        number //= WORD
    return words
