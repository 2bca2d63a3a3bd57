// The loop with which Megatron cuts a shuffled order of sequences into samples, for tools/bench/order.py to measure:
// one sample after another, one sequence after another, a read at random for each.
#include <cstdint>

// rows [n_samples + 1, 2]: where each sample begins, (place in the order, offset in the sequence there). A sample is
// seq_len + 1 tokens, and its last one is the first of the next.
extern "C" void sample_index(const int32_t* lengths, const int32_t* order, int64_t seq_len, int64_t n_samples,
                             int32_t* rows) {
    int64_t place = 0;
    int32_t offset = 0;
    rows[0] = rows[1] = 0;
    for (int64_t row = 1; row <= n_samples; ++row) {
        for (int64_t left = seq_len + 1;;) {
            const int64_t held = lengths[order[place]] - offset;
            if (held >= left) {
                offset += static_cast<int32_t>(left - 1);
                break;
            }
            left -= held;
            ++place;
            offset = 0;
        }
        rows[2 * row] = static_cast<int32_t>(place);
        rows[2 * row + 1] = offset;
    }
}
