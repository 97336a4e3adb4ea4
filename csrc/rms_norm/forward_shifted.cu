#include "../norm/forward_shifted.h"

namespace tch_extension::norm {

template bool start_forward_shifted<RmsNorm>(const NormForward&, cudaStream_t);

}  // namespace tch_extension::norm
