// The words in which the generated part of a pointwise kernel describes its tensors.

/// Where a tensor varies: along D's contiguous axis ("fast"), the other one ("slow"), both, or neither; "bits" is packed along fast.
enum class Along { nothing, slow, fast, both, bits };

/// What a reduction sums over, and how.
enum class Over { slow, fast, both };
enum class Combine { sum, amax };

/// `vector`: whole vectors of it are aligned.
struct Source {
    EpiType type;
    Along along;
    bool vector;
};

using Target = Source;

struct Reduction {
    EpiType type;
    Over over;
    Combine combine;
};
