"""Keys of random numbers: whole numbers to a seed, such that different keys never meet.

numpy pads the words of a SeedSequence with zeros up to four, and splits a number from 2^32 on into several
words: [1, 2, 3] is [1, 2, 3, 0], and [2^32 + 5] is [5, 1]. Keys that are handed to it as they are meet as
soon as their lengths differ. `seed_sequence` is the only way by which this project makes one from several
numbers.
"""

import numpy as np

WORD = 1 << 32
# first number of the key of a corpus's sample order: two words, and as many as four with seed and epoch
SAMPLE_ORDER = 0x6F72646572
END = 1  # last word of a long key, so that it has five words or more, and numpy pads none


def seed_sequence(*numbers: int) -> np.random.SeedSequence:
    """The SeedSequence of a key of whole numbers, negative and large ones included; no two keys share one."""
    return np.random.SeedSequence(key_words(*numbers))


def key_words(*numbers: int) -> list[int]:
    """The words of a key: a one-to-one function of the tuple of numbers, also behind numpy's padding.

    Three numbers below 2^32 are their own words (four with the padding), and so is the key of a sample order,
    as they were before this function; recorded runs keep their draws. Any other key is written out: how many
    numbers, then for each its sign and how many words it has, and these. That is at least five words, to
    which numpy adds none.
    """
    numbers = tuple(int(number) for number in numbers)
    if len(numbers) == 3 and all(0 <= number < WORD for number in numbers[1:]):
        if numbers[0] == SAMPLE_ORDER:
            return [*_words_of(SAMPLE_ORDER), *numbers[1:]]
        if 0 <= numbers[0] < WORD and list(numbers[:2]) != _words_of(SAMPLE_ORDER):
            return list(numbers)
    words = [len(numbers)]
    for number in numbers:
        own = _words_of(abs(number))
        words += [2 * len(own) + (number < 0), *own]
    return [*words, *[0] * (3 - len(words)), 0, END]


def _words_of(number: int) -> list[int]:
    """Digits of a number from 0 in base 2^32, the lowest first; none for 0."""
    words = []
    while number:
        words.append(number % WORD)
        number //= WORD
    return words
