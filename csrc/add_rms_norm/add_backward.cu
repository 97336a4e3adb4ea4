#include "../norm/add_backward.h"

namespace tch_extension::norm {

template bool start_add_backward<RmsNorm>(const NormAddBackward&, cudaStream_t);

}  // namespace tch_extension::norm
