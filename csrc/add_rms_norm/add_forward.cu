#include "../norm/add_forward.h"

namespace tch_extension::norm {

template bool start_add_forward<RmsNorm>(const NormAddForward&, cudaStream_t);

}  // namespace tch_extension::norm
